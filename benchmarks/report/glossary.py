"""What every number of the report means."""

from __future__ import annotations

from benchmarks.lag_sweep.measures import (
    COLLAPSE_EVALUATIONS,
    COLLAPSE_SHARE,
    D_BAR_SPIKE,
    NO_INTERCEPTION,
    SPIKE_FACTOR,
    SPIKE_WINDOW,
)
from benchmarks.report.agreement import MARGIN
from benchmarks.report.protocol import ALPHA, MATTERS, TESTED_FROM
from benchmarks.statistics import FINAL_EVALUATIONS

STATISTICS = {
    "cell": "one training run: an arm on a task, at a learning rate, a lag and a seed",
    "n": "seeds with a done cell, of those asked for; of a comparison, the seeds that both sides have",
    "±": "half width of Student's 95 % interval of the mean over seeds; no interval for one seed",
    "IQM": "interquartile mean: the mean without the lowest and the highest quarter of the seeds "
    "(Agarwal et al. 2021, arXiv:2108.13264; scipy.stats.trim_mean)",
    "difference": "mean over common seeds of first minus second, with Student's 95 % interval, not corrected",
    "p": "of the two-sided paired t test",
    "p (Holm)": "the same, corrected for the number of tests of its family (Holm 1979): below "
    f"{ALPHA:g} is a verdict. Tests not answered yet count as p = 1, so that the others can only fall",
    "p (Wilcoxon)": "of the two-sided signed rank test: a check of the t test's normality, without a say in the "
    "verdict. With 5 seeds it cannot be below .0625",
    "P(improvement)": "probability of improvement: share of all pairs of one run of each side in which the first is "
    "above, ties half (Agarwal et al. 2021; the Mann-Whitney statistic over the number of pairs)",
    "seeds won": "seeds at which the first is above the second, and below it",
    "verdict": f"better or worse: p (Holm) below {ALPHA:g}. No difference that matters: the 95 % interval lies within "
    f"±{MATTERS:g}. Undecided: anything else. Not answered: seeds are missing",
    "described, not tested": f"on the real stack, comparisons with fewer than {TESTED_FROM} seeds: means and "
    "intervals, no verdict",
    "agree, differ, open": f"of the two engines: the 95 % interval of their difference lies within ±{MARGIN:g}; it "
    f"does not, and p (Holm) is below {ALPHA:g}; neither. Interval and p are Welch's: the engines share no seeds, and "
    "their variances may differ",
    "matched fixed radius": "the base loss at constant clip radii: the means of SAT's effective radii over the steps "
    "and seeds at the same task, learning rate and lag",
}
METRICS = {
    "final": f"held-out score, the mean of the last {FINAL_EVALUATIONS} evaluations: the primary outcome",
    "initial, peak, drop": "score before the first step; the best evaluation; peak minus final",
    "AUC": "mean score over the steps, by the trapezoidal rule",
    "collapsed": f"cells with {COLLAPSE_EVALUATIONS} evaluations in a row below {COLLAPSE_SHARE:.0%} of the best until "
    "then, whether they recover or not",
    "lag, age": "lag n: the sampler gets the weights every n optimizer steps (broadcast), or n steps late (constant). "
    "Age: optimizer steps between the weights that sampled a token and those that train on it",
    "d-bar": "mean over the active tokens of |log pi - log mu|, pi the policy in training, mu the sampler: mean over "
    "the run, and over its last tenth (end)",
    "d-bar spikes": f"steps with a d-bar above {D_BAR_SPIKE:g}",
    "KL": "mean of log mu - log pi over the tokens, an estimator of KL(mu, pi)",
    "ESS": "effective sample size of the token ratios pi/mu, as a share of the tokens",
    "entropy": "of the policy, in nats per token, over the last tenth of the steps",
    "gradient spikes": f"steps whose gradient norm, before the clip, is above {SPIKE_FACTOR:g} times the median of the "
    f"up to {SPIKE_WINDOW} steps before",
    "clip, dual clip": "shares of the active tokens that are clipped, and cut by the dual clip",
    "gate": "share of the active tokens beyond SAT's tail reference q; about a tenth on any data",
    "intercepted": "share of the active tokens whose gradient SAT removes where the base loss keeps it",
    "q": "SAT's tail reference: the 90 % quantile of |log pi - log mu| over the tokens",
    "cap": "largest ratio that a token with A < 0 is weighed with, of arms with a cap that depends on q",
    "eps_eff": "effective radius: that with which PPO would have SAT's gradient; lower and upper",
    "samples/s": "responses sampled and trained on per second, evaluations between the steps included",
    "seconds": "wall time of a cell; CPU seconds where the laboratory measures them",
    "no signal": f"the cell says nothing of its method, e.g. SAT intercepts below {NO_INTERCEPTION:g} of the tokens, "
    "or the rewards are equal in half of the steps",
    "identical": "arms whose final weights (lab) or scores and gradient norms (verl) are the same to the last bit",
}
