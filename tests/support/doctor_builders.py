"""A machine on which everything works, for the tests of stepsplit doctor."""

from __future__ import annotations

from stepsplit.dashboard.environment import Environment, FolderState, Requirement, TorchState

DISK = FolderState(True, "ext4", 100 << 30)
TORCH = TorchState(
    version="2.13.0+cu130",
    cuda="13.0",
    nccl="2.28.9",
    cupti="13.0.85",
    gpus=("NVIDIA H100", "NVIDIA H100"),
    backends=("gloo", "nccl"),
    activities=("CPU", "CUDA"),
    flight_recorders=("nccl", "gloo"),
    host_events=13,
    device_events=4,
)
HEALTHY = Environment(
    stepsplit="0.2.0",
    python="3.11.7",
    system="Linux x86_64",
    cores=16,
    requirements=(
        Requirement("numpy", "", "1.26.4", "2.4.6"),
        Requirement("pandas", "", "2.2.0", "2.2.0"),
        Requirement("torch", "collect", "2.4", "2.13.0+cu130"),
        Requirement("dash", "dashboard", "4.3", "4.4.1"),
        Requirement("plotly", "dashboard", "6.0", "7.1.0"),
        Requirement("fsspec", "cloud", "2024.2.0", "2026.9.0"),
    ),
    torch=TORCH,
    smi_gpus=TORCH.gpus,
    driver="580.65.06",
    has_pynvml=True,
    current=DISK,
    cache=DISK,
    temporary=DISK,
    shared_memory_bytes=64 << 30,
    clock_source="tsc",
)
