"""Answer grading that neither hangs nor lies.

One call, :func:`grade`, serves the reward function and the evaluation: it finds the answer a response commits to
(:mod:`~sat_verl.grading.extract`), reads plain integers itself (:mod:`~sat_verl.grading.normalize`) and hands
everything else to math-verify in a process that can be killed (:mod:`~sat_verl.grading.verify`).
"""

from sat_verl.grading.grader import Grade, grade
from sat_verl.grading.verify import DEFAULT_DEADLINE_S, MathVerifyMissingError

__all__ = ["DEFAULT_DEADLINE_S", "Grade", "MathVerifyMissingError", "grade"]
