"""Routing replay (R3, arXiv 2510.11370): the trainer's MoE layers use the experts that the rollout engine used.

A mixture-of-experts model picks the top-k experts of a token by router logits, and near-ties fall differently in two
engines, two dtypes or two versions of the weights: the token then runs through other weights, and its log-ratio jumps.
R3 takes the *set* of experts from the rollout and computes the gates from the trainer's **current** router logits,
restricted to that set, so that gradients still reach the router.

- :mod:`~sat_verl.routing.routers`: the router classes of transformers that this works with, and their gates.
- :mod:`~sat_verl.routing.replay`: the context in which a model's forward uses given experts. Knows nothing of verl.
- :mod:`~sat_verl.routing.batch`: from verl's ``routed_experts`` to the rows that a router sees, packed or padded.
- :mod:`~sat_verl.routing.engine`: verl's FSDP2 engine with replay.
- :mod:`~sat_verl.routing.megatron`: verl's Megatron engine, which replays by itself: counts, and incomplete routes.
- :mod:`~sat_verl.routing.config`: the options.

**What is replayed.** With the rollout's log-probs as denominator (bypass mode) old log-probs are not recomputed, so the
forward of the actor update replays and nothing else does; where they are recomputed, that forward replays too. The
reference policy routes natively, as in verl.

**What is not.** The last token of a sequence has no route, since the engine never fed it; its logits are not used and
nobody attends to it. A token whose recorded experts are not k different ones (verl fills rows that the engine did not
record with zeros) has no route. Both route natively and are counted
(:meth:`~sat_verl.routing.engine.FSDPRoutingReplay.take_metrics`); ``incomplete=fail`` refuses the second kind.

A response that was resumed under newer weights keeps for each token the route of the pass that sampled its successor.
These routes are complete, but not exact: before the engine sampled the later tokens it had computed the earlier ones
anew, by the newer weights' routes. The trainer counts such responses as mixed.

**Cost.** One more softmax over the experts and a comparison of two sets per token and layer: up to 4 % of the CPU time
of an optimizer step of a tiny MoE (``python -m benchmarks.replay_cost``). ``compare=true`` adds a forward of the batch.
"""
