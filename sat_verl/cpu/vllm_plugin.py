"""The ``vllm.general_plugins`` entry point: vLLM calls :func:`register` in each of its processes."""

from sat_verl import cpu


def register() -> None:
    """Install the CPU bridges and the replica's thread binding; does nothing outside a CPU run."""
    if not cpu.enabled():
        return
    from sat_verl.cpu import bridges, placement

    bridges.install()
    placement.apply_to_vllm()
