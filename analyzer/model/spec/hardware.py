"""What the job runs on: peaks, memory, links, and how much of them real programs reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What joins a GPU to the others: bytes_per_s of one GPU in one direction, as sold.

    ring is the share of it that large NCCL rings reach (busbw / bytes_per_s); latency_ns is what
    one more step over it costs a small collective.
    """

    name: str
    bytes_per_s: float
    ring: float
    latency_ns: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a GPU family's peaks real kernels reach, fitted on published runs.

    gemm, attention (fused, forward) and unfused_attention are shares of the dense peak, memory is
    the share of the memory's bandwidth, launch_ns what each kernel costs beside its work, jitter by
    what ratio a node's step times vary. host_ns is what the host needs to launch a layer's forward,
    0 for the framework's guess. error is how far off step times of 9 of 10 runs were that were not
    fitted on, a ratio. rows name the runs of the fit ("run:..." a user's own, else published),
    frameworks, devices and dtypes what those ran on.
    """

    gemm: float
    attention: float
    unfused_attention: float
    memory: float
    launch_ns: float
    tile: int = 0
    jitter: float = 0.02
    host_ns: float = 0.0
    error: float = 0.3
    frameworks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Learned:
    """What runs of one's own taught about memory: a factor on the activations of every stage, and
    bytes that every rank needs beside what is predicted."""

    activations: float = 1.0
    constant_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of accelerator in one kind of cluster.

    peaks_flops_per_s are dense, by dtype. gpus_per_node counts the GPUs that the intra link joins
    (72 on GB200 NVL72). nvls is the busbw of an all-reduce that the switch sums over the link's
    bytes_per_s, 0 where there is none. host is the link to host memory. learned corrects the memory
    of frameworks that own runs were measured with.
    """

    name: str
    family: str
    peaks_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bytes_per_s: float
    gpus_per_node: int
    intra: Link
    inter: Link
    host: Link
    efficiency: Efficiency
    nvls: float = 0.0
    multiprocessors: int = 0
    learned: Learned = Learned()

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """The dense peak at a dtype, None where the device has none or none is published."""
        return dict(self.peaks_flops_per_s).get(dtype)
