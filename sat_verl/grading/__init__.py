"""Answer grading that neither hangs nor lies.

One call, :func:`grade_sample`, serves the reward function and the evaluation: it finds the answer a response commits
to (:mod:`~sat_verl.grading.extract`), reads plain integers itself (:mod:`~sat_verl.grading.normalize`) and hands
everything else to math-verify in a process that can be killed (:mod:`~sat_verl.grading.verify`).
"""

from sat_verl.grading.grader import DOMAINS, Grade, grade, grade_policies, is_cut
from sat_verl.grading.sources import canonical, grade_sample
from sat_verl.grading.verify import DEFAULT_DEADLINE_S, MathVerifyMissingError

__all__ = [
    "DEFAULT_DEADLINE_S",
    "DOMAINS",
    "Grade",
    "MathVerifyMissingError",
    "canonical",
    "grade",
    "grade_policies",
    "grade_sample",
    "is_cut",
]
