"""GPU types: memory and arithmetic from their makers' data sheets, prices as a first guess.

Memory is what ``nvidia-smi`` reports, arithmetic is dense bfloat16 with float32 accumulation. Prices are what clouds
ask for one GPU and hour on demand, from the cheapest to the dearest; they change, so set ``plan.price_per_gpu_hour``.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.plan.quantities import Range


@dataclass(frozen=True)
class Gpu:
    """One GPU type.

    Attributes:
        name: for ``plan.gpu``.
        title: in words.
        mib: memory in MiB, as the driver reports it.
        tflops: dense bfloat16, 1e12 floating-point operations a second.
        bandwidth: of its memory, in 1e9 bytes a second.
        price: US dollars an hour.
    """

    name: str
    title: str
    mib: int
    tflops: float
    bandwidth: float
    price: Range

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.mib * 2.0**20


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", "B200 180 GB", 183359, 2250.0, 8000.0, Range(3.5, 8.0)),
        Gpu("h200", "H200 141 GB", 143771, 989.4, 4800.0, Range(2.3, 6.0)),
        Gpu("h100", "H100 80 GB SXM", 81559, 989.4, 3350.0, Range(1.8, 5.0)),
        Gpu("a100_80", "A100 80 GB SXM", 81920, 311.8, 2039.0, Range(1.0, 3.5)),
        Gpu("a100_40", "A100 40 GB SXM", 40960, 311.8, 1555.0, Range(0.8, 3.0)),
        Gpu("l40s", "L40S 48 GB", 46068, 362.1, 864.0, Range(0.7, 2.0)),
        Gpu("rtx4090", "RTX 4090 24 GB", 24564, 165.2, 1008.0, Range(0.3, 0.8)),
        Gpu("rtx3090", "RTX 3090 24 GB", 24576, 71.0, 936.0, Range(0.15, 0.5)),
    )
}
