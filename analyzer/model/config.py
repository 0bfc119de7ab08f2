"""The config of a training job: model, parallel layout, training recipe and hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from stepsplit.analyzer.model.config_limits import KEY, MAX_NUMBER, AsDecimal, Natural, NumberLimits
from stepsplit.analyzer.model.profile import FrameworkProfile, load_device, load_framework
from stepsplit.analyzer.model.schedule_names import TWO_STAGES, Schedule

MAX_EXPERTS = 10**6
"""Most experts of a layer. A search for layouts tries all their divisors; published models have up
to 2,048."""

# The architecture of a decoder transformer.

Norm = Literal["rms", "layer"]

Activation = Literal["gelu", "gelu_new", "relu", "swiglu-clamped"]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts that replaces the MLP of most layers.

    ffn is the width of one expert, shared_ffn that of the shared expert, which every token passes
    in addition to its top_k experts (0: none). The first dense_layers layers have a dense MLP.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: Natural = 0
    dense_layers: Natural = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): the sizes of its compressed projections.

    query_rank 0 means that queries are not compressed. The query and key of a head have
    nope + rope elements, its value has value elements.
    """

    query_rank: Natural
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a decoder transformer.

    Parameters, FLOPs, saved activations and communication volumes follow from these sizes.

    Args:
        layers: Transformer layers.
        hidden: Hidden size.
        heads: Attention heads.
        kv_heads: Key-value heads; fewer than heads with grouped-query attention.
        head_size: Size of one head.
        ffn: Width of the MLP.
        vocab: Vocabulary size, not padded.
        gated: Whether the MLP has a gate (SwiGLU: three products instead of two). Default False.
        tied: Whether the output head shares the embedding's weights. Default True.
        positions: Learned positions; 0 for rotary or no position embeddings. Default 0.
        norm: "layer" (default) or "rms".
        biases: Whether linear layers have biases. Default True.
        qkv_biases: Whether the query, key and value projections have biases even if biases is
            False. Default False.
        experts: Sizes of the mixture of experts; None (default) for a dense model.
        latent: Sizes of multi-head latent attention; None (default) for ordinary attention.
        name: Name of the model. Default "".
        mtp_layers: Multi-token prediction modules after the last layer, each with a projection, a
            layer and the head again. Default 0; not counted in layers.
        qk_norm: Whether each head's queries and keys have a norm (Qwen3). Default False.
        parallel_block: Whether attention and MLP read the same input and their outputs are summed
            (GPT-J, GPT-NeoX, PaLM, Falcon). Default False.
        activation: Activation function of an MLP that is not gated: "gelu" (default), "relu", or
            "gelu_new", GPT-2's in transformers, which runs as single operations; of a gated one
            "swiglu-clamped", that of gpt-oss, or else SwiGLU.
        window: Tokens to which a query attends in layers with sliding windows, its own included; 0
            (default): all layers attend to the whole sequence.
        full_every: Every so many layers one attends to the whole sequence; 0 (default): none with
            a window.

    Examples:
        >>> model = ModelConfig(
        ...     layers=24, hidden=2048, heads=16, kv_heads=16, head_size=128, ffn=8192, vocab=50304
        ... )
        >>> model.kv_size
        2048
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    positions: Natural = field(default=0, metadata={KEY: "learned_positions"})
    norm: Norm = "layer"
    biases: bool = True
    qkv_biases: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    name: str = ""
    mtp_layers: Natural = 0
    qk_norm: bool = False
    parallel_block: bool = False
    activation: Activation = "gelu"
    window: Natural = 0
    full_every: Natural = 0

    @property
    def expert_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return 0 if self.experts is None else max(0, self.layers - self.experts.dense_layers)

    def count_attended_keys(self, tokens: int) -> float:
        """Twice the mean number of keys of a query in tokens of one document, over queries and
        layers: tokens, less what windows hide.

        Args:
            tokens: Tokens of the document.
        """
        if not 0 < self.window < tokens:
            return float(tokens)
        full_layers = self.layers // self.full_every if self.full_every else 0
        windowed_keys = 2 * self.window - self.window**2 / tokens
        return windowed_keys + (tokens - windowed_keys) * full_layers / self.layers

    @property
    def kv_size(self) -> int:
        """Elements of the keys (and of the values) of one token in one layer."""
        return self.kv_heads * self.head_size


# The hardware: peaks, memory, links, and the fraction of each that real programs reach.


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a GPU: bytes_per_s of one GPU in one direction, from the data sheet.

    ring is the fraction of it that large NCCL rings reach (busbw / bytes_per_s); latency_ns is the
    time that one more ring step over the link adds to a small collective.
    """

    name: str
    bytes_per_s: float
    ring: float
    latency_ns: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of a GPU family's peaks that real kernels reach, fitted on published runs.

    Args:
        gemm: Fraction of the dense peak that large GEMMs reach, 0..1.
        attention: The same for fused attention, forward; 0: the rate of the kernel that runs.
        unfused_attention: The same for attention that stores its scores.
        memory: Fraction of the memory bandwidth that memory-bound kernels reach, 0..1.
        launch_ns: Fixed cost of a kernel, in ns.
        tile: Tile size of GEMMs for wave quantization; 0 (default) to ignore it.
        jitter: Relative variation of a node's step time. Default 0.02.
        gemm_fp8: Fraction of the fp8 peak that large GEMMs reach; None (default): as gemm.
        gemm_nvfp4: The same of the nvfp4 peak; None (default): as gemm_fp8.
        gemm_result: Time to write the result of a GEMM over that of a memory-bound kernel for as
            many bytes. Default 1.
        jitter_per_layer: jitter if every layer waits for all ranks (ZeRO-3); None (default): as
            jitter.
        host_ns: Host time to launch the forward pass of a layer, in ns; 0 (default): the calls of
            the framework, each as long as host_call_ns of the hardware.
        expert_ns: Time that the forward pass of a layer with experts waits for its launches, in
            ns; the backward pass twice that. Default 0.
        error: Relative error of the step time that 9 of 10 runs outside of the fit stay below.
            Default 0.3.
        frameworks: Frameworks of the runs of the fit.
        devices: Their devices.
        dtypes: Their dtypes.
        rows: Their publishers; "run:..." is a run of the user.
        most_tokens: Their longest sequence; 0 (default) if unknown, likewise below.
        most_gpus: Their largest number of GPUs.
        most_sharded: Their largest group of ZeRO-3.

    Examples:
        >>> efficiency = Efficiency(
        ...     gemm=0.75, attention=0.5, unfused_attention=0.2, memory=0.8, launch_ns=3000.0
        ... )
        >>> efficiency.jitter
        0.02
    """

    gemm: float
    attention: Annotated[float, NumberLimits(0)]
    unfused_attention: float
    memory: float
    launch_ns: float
    tile: AsDecimal = 0
    jitter: float = 0.02
    gemm_fp8: float | None = None
    gemm_nvfp4: float | None = None
    gemm_result: float = 1.0
    jitter_per_layer: Annotated[float, NumberLimits(0)] | None = None
    host_ns: float = 0.0
    expert_ns: Annotated[float, NumberLimits(0)] = 0.0
    error: float = 0.3
    frameworks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    most_tokens: Natural = 0
    most_gpus: Natural = 0
    most_sharded: Natural = 0


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """What a kernel of fused causal attention reaches, in FLOP/s of the causal half.

    At s tokens the rate is s / (s + start_tokens) of that at long sequences.
    """

    forward_flops_per_s: float = field(metadata={KEY: "forward"})
    backward_flops_per_s: float = field(metadata={KEY: "backward"})
    start_tokens: Annotated[float, NumberLimits(0)] = field(default=0.0, metadata={KEY: "start"})
    backward_start_tokens: Annotated[float, NumberLimits(0)] = field(
        default=0.0, metadata={KEY: "backward_start"}
    )


@dataclass(frozen=True, slots=True)
class GemmRate:
    """The measured rate of one GEMM (rows x inner) (inner x columns) with operands of dtype."""

    rows: int
    columns: int
    inner: int
    flops_per_s: float
    dtype: GemmDtype = "bf16"


@dataclass(frozen=True, slots=True)
class MemoryCorrection:
    """A memory correction calibrated on the user's own runs: a factor on the saved activations of
    every stage, and constant bytes added on every rank."""

    activations: float = 1.0
    constant_bytes: Annotated[int, NumberLimits(-MAX_NUMBER)] = 0


@dataclass(frozen=True, slots=True)
class HardwareConfig:
    """One kind of accelerator in one kind of cluster.

    Args:
        name: Name of the accelerator.
        family: GPU family, which selects a default efficiency ("hopper", "ampere", ...).
        peaks_flops_per_s: (dtype, dense peak in FLOPs per second) pairs.
        memory_bytes: Device memory, in bytes.
        memory_bytes_per_s: Its bandwidth.
        gpus_per_node: GPUs connected by the intra link (72 on GB200 NVL72).
        intra: Link between GPUs of a node.
        inter: Link between nodes, per GPU (key nodes_link in a file).
        host: Link to host memory.
        efficiency: Fractions of the peaks that real kernels reach.
        nvls: busbw of an all_reduce in the switch (NVLS) over intra.bytes_per_s; 0 (default)
            without NVLS.
        multiprocessors: Streaming multiprocessors of a GPU; 0 (default) if unknown.
        learned: Memory correction calibrated on the user's own runs. Default: none.
        attention: Measured rate of fused attention; None (default): the published rate of the
            kernel that runs.
        clock: Speed that its GEMMs and attention sustain, relative to the fractions of the family.
            Default 1.
        clock_mhz: Clock that the GPUs keep up while they train, in MHz; 0 (default) if unknown. It
            sets clock, unless that is stated: GEMMs reach a fraction of the peak at that clock.
        peak_mhz: Clock of the peaks; 0 (default) if unknown.
        gemms: Measured rates of GEMMs; a GEMM of another shape is scaled by those near it. Default
            none: the fractions of the family.
        host_update_bytes_per_s: What the processors of a host read and write per second while they
            update offloaded optimizer states; 0 (default): as those of ZeRO-Offload.
        gpus_per_host: GPUs that share these processors; 0 (default): those of the node, up to 8.
        host_call_ns: Time of the host for one forward of torch's Linear, in ns: 13,480 (default) on
            a Xeon 8480C, 33,170 to 37,080 on Grace.
        power_watts: Power limit of a GPU; 0 (default) if unknown. Below that of the preset clocks
            fall with its root, unless clock is stated.

    Examples:
        >>> from stepsplit.analyzer import read_job
        >>> hardware = read_job("job.toml").hardware
        >>> hardware.gpus_per_node
        8
    """

    name: str
    family: str
    peaks_flops_per_s: tuple[tuple[str, float], ...] = field(metadata={KEY: "peaks"})
    memory_bytes: int
    memory_bytes_per_s: float
    gpus_per_node: int
    intra: Link
    inter: Link = field(metadata={KEY: "nodes_link"})
    host: Link
    efficiency: Efficiency
    nvls: Annotated[float, NumberLimits(0)] = 0.0
    multiprocessors: int = 0
    learned: MemoryCorrection = MemoryCorrection()
    attention: AttentionRate | None = None
    clock: float = 1.0
    gemms: tuple[GemmRate, ...] = ()
    host_update_bytes_per_s: float = 0.0
    gpus_per_host: int = 0
    power_watts: float = 0.0
    clock_mhz: float = 0.0
    peak_mhz: float = 0.0
    host_call_ns: float = 13_480.0

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Returns the dense peak of a dtype in FLOPs per second.

        None if the device does not support the dtype or no peak is published.
        """
        return dict(self.peaks_flops_per_s).get(dtype)


# How one step trains: batch, precision, optimizer, recomputation and offloading.

StoredDtype = Literal["fp32", "bf16", "fp16"]
"""What activations between layers and gradients are kept in."""

Dtype = Literal[StoredDtype, "fp8"]

GemmDtype = Literal[Dtype, "nvfp4"]
"""What GEMMs of linear layers compute in."""

DTYPES: tuple[GemmDtype, ...] = get_args(GemmDtype)

QUANTIZED: tuple[GemmDtype, ...] = ("fp8", "nvfp4")
"""Those whose operands are cast from 16 bits before each GEMM; attention and head stay in bf16."""

Optimizer = Literal["adam", "adam-8bit", "sgd", "sgd-momentum", "muon", "lion"]

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)

Recompute = Literal["none", "selective", "full", "every", "sqrt"]

RecomputePart = Literal["core-attention", "mla-up", "norms", "activation", "mlp", "experts"]
"""Parts of a layer that are recomputed alone (Megatron-LM's recompute_modules)."""

RECOMPUTE_PARTS: tuple[RecomputePart, ...] = get_args(RecomputePart)

Framework = str
"""A name in presets/frameworks.toml."""

State = Literal["optimizer", "parameters", "activations"]

Target = Literal["cpu", "nvme"]

AttentionKernel = Literal[
    "", "flash-2", "flash-3", "flash-4", "cudnn", "cudnn-fp8", "triton", "ck", "aiter",
    "triton-2023",
]  # fmt: skip
"""Fused attention: FlashAttention 2 to 4 (torch SDPA calls 2), cuDNN (Transformer Engine), in fp8
too, Triton, composable kernel and aiter on AMD, and the Triton kernel of llm-foundry's
benchmarks."""

Fp8Scaling = Literal["tensor", "row"]
"""What shares a scale in fp8 GEMMs: a whole tensor, or each row of it."""

UnfusedPart = Literal["norms", "rotary", "activation", "softmax"]
"""What a program may run as separate torch operations: RMS norms, rotary embedding, the gated
activation, and the softmax of attention that stores its scores."""

UNFUSED_PARTS: tuple[UnfusedPart, ...] = get_args(UnfusedPart)

CudaGraph = Literal["none", "layers", "step"]
"""What CUDA graphs replay: nothing, all of a layer but its experts, or the whole step."""

LoraTarget = Literal["qkv", "output", "mlp"]
"""Linear layers with adapters: of attention those before and the one after its core, and those of a
dense MLP or of the shared expert."""

LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The training settings of one optimizer step.

    Args:
        seq_len: Tokens per sequence.
        micro_batch: Sequences per microbatch on one data-parallel rank.
        global_batch: Sequences per step.
        dtype: dtype of the GEMMs: "fp32", "bf16" (default), "fp16", "fp8" or "nvfp4" (with the
            last two weights and activations stay in bf16).
        optimizer: "adam" (default), "adam-8bit", "sgd", "sgd-momentum", "muon" or "lion".
        recompute: Activation recomputation: "none" (default), "selective", "full", "every" or
            "sqrt".
        recompute_every: With recompute "every", the input of each recompute_every-th layer is
            saved. Default 1.
        recompute_parts: Parts of each layer that are recomputed. Default: none.
        recompute_layers: With recompute "full", how many layers of each model stage are recomputed;
            0 (default) for all.
        early_stop: Whether the recomputation of a layer stops before the last GEMM of its MLP,
            whose output nothing needs, as torch.utils.checkpoint does. Default False.
        moments_dtype: dtype of the optimizer's moments: "fp32" (default) or "bf16".
        master_weights: Whether the optimizer keeps weights in fp32; False: it updates 16-bit ones.
            Default True.
        framework: Framework whose behavior is modelled. Default "megatron".
        gradient_dtype: dtype of the gradient reduction. Default "fp32".
        activation_dtype: dtype of the activations between layers. Default "bf16".
        flash_attention: Whether attention is fused and stores no scores. Default True.
        dropout: Whether the model has dropout. Default False.
        fused_loss: Whether the cross-entropy loss is fused. Default True.
        offload: States that are offloaded: "optimizer", "parameters", "activations". Default: none.
        offload_to: "cpu" (default) or "nvme".
        offload_layers: Layers of a rank whose activations are offloaded; 0 (default) for all.
        attention_kernel: Kernel of fused attention; "" (default): the one that the framework calls
            on the hardware.
        fp8_activations: Whether fp8 training also stores the inputs of the activation function in
            fp8. Default False.
        compile: Whether torch.compile fuses the operations of the model. Default False.
        fp8_scaling: What shares a scale in fp8: "tensor" (default) or "row".
        cuda_graph: What CUDA graphs replay: "none" (default), "layers" or "step".
        document_tokens: Tokens of the documents that are packed into a sequence, beyond which
            attention does not look; 0 (default): the sequence is one document.
        clip_gradients: Whether gradients are clipped by their norm over all ranks. Default True.
        fused_optimizer: Whether Adam is one kernel; False: torch's lists of tensors (foreach).
            Default True.
        unfused: Parts of a layer that run as separate operations: "norms", "rotary", "activation",
            "softmax". Default None: as the framework does, all with fsdp2, ddp and huggingface
            without compile, else none.
        lora_rank: Rank of the adapters (LoRA) that alone are trained; 0 (default): all parameters
            are.
        lora_targets: Linear layers with adapters: "qkv", "output", "mlp". Default: all three.
        program: Name of the program that trains, if it is another than the framework: a fork, or
            code of one's own that works like it. Default "": the framework itself.
        recipe: Name of the recipe that the job follows in all settings, as the authors of the
            framework or of the GPU tuned and published it: its runs are predicted more closely.
            Default "": none.

    Examples:
        >>> training = TrainingConfig(seq_len=4096, micro_batch=1, global_batch=64)
        >>> training.gradient_bytes
        4
    """

    seq_len: int
    micro_batch: int
    global_batch: int
    dtype: GemmDtype = "bf16"
    optimizer: Optimizer = "adam"
    recompute: Recompute = "none"
    recompute_every: int = field(default=1, metadata={KEY: ""})
    recompute_parts: frozenset[RecomputePart] = field(default=frozenset(), metadata={KEY: ""})
    recompute_layers: Natural = 0
    early_stop: bool = False
    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    master_weights: bool = True
    framework: Framework = "megatron"
    gradient_dtype: StoredDtype = "fp32"
    activation_dtype: StoredDtype = "bf16"
    flash_attention: bool = True
    dropout: bool = False
    fused_loss: bool = True
    offload: frozenset[str] = frozenset()
    offload_to: Target = "cpu"
    offload_layers: Natural = 0
    attention_kernel: AttentionKernel = ""
    fp8_activations: bool = False
    compile: bool = False
    fp8_scaling: Fp8Scaling = "tensor"
    cuda_graph: CudaGraph = "none"
    document_tokens: Natural = 0
    clip_gradients: bool = True
    fused_optimizer: bool = True
    unfused: frozenset[UnfusedPart] | None = None
    lora_rank: Natural = 0
    lora_targets: frozenset[LoraTarget] = frozenset(LORA_TARGETS)
    program: str = ""
    recipe: str = ""

    @property
    def attended_tokens(self) -> int:
        """Tokens of a document, or of the sequence if it is one."""
        return min(self.document_tokens or self.seq_len, self.seq_len)

    @property
    def is_quantized(self) -> bool:
        """Whether linear layers cast their operands to 8 or 4 bits."""
        return self.dtype in QUANTIZED

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight in the forward pass."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def activation_bytes(self) -> int:
        """Bytes of one element of the activations between layers."""
        return BYTES[self.activation_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient in the gradient reduction."""
        return BYTES[self.gradient_dtype]


# How model and batch are distributed over the ranks.

ContextKind = Literal["ring", "all-gather", "ulysses"]

Reshard = Literal["default", "always", "never"]

Dispatcher = Literal["all-to-all", "deepep", "hybridep"]
"""What moves tokens to their experts: NCCL, once per expert, or a library that sends a token once
to each rank, and over the network once to each node."""

Axis = Literal["tp", "cp", "ep", "dp", "pp"]

RANK_ORDER: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The parallel layout: sizes of the axes and the options of each.

    Args:
        tp: Tensor-parallel ranks. Default 1, like all sizes.
        pp: Pipeline-parallel ranks.
        dp_replicate: Data-parallel replicas (DDP); with dp_shard > 1 this is HSDP.
        dp_shard: Ranks over which FSDP shards the weights; with zero 1 or 2, over which each
            replica shards its optimizer states, 1 for all ranks.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks.
        expert_tp: Tensor-parallel ranks of the experts.
        rank_order: The axes, fastest-varying first. Default tp, cp, ep, dp, pp.
        sequence_parallel: Whether Megatron sequence parallelism is on. Default False.
        zero: ZeRO stage. 1 and 2 shard the optimizer (and gradients) over all data- and
            context-parallel ranks (or those of dp_shard), 3 shards over dp_shard. Default 0.
        schedule: Pipeline schedule. Default "1f1b".
        chunks: Model stages (virtual stages) per rank of an interleaved schedule. Default 1.
        layers_per_stage: Layers of each model stage; None (default) to split them evenly.
        overlap: Axes whose communication overlaps with compute. Default: none.
        context_kind: Context parallelism: "ring" (default), "all-gather" or "ulysses".
        reshard_after_forward: What FSDP does with gathered weights: "always" frees them after the
            forward pass, "never" keeps them until the backward pass, "default" follows torchtitan:
            keeps the last unit, and with a pipeline all units.
        scatter_gather: Whether pipeline messages are split over tp and gathered by the receiving
            node. Default False.
        split_vocab: Whether tp also shards embedding and head. Default True.
        root_unit: Whether FSDP gathers the parameters outside of the layers as one unit. Default
            False.
        sum_once: Whether FSDP reduces gradients only after the last microbatch. Default False.
        bucket_bytes: Size of a DDP bucket, in bytes; 0 (default) for PyTorch's default.
        dispatcher: What moves tokens to their experts: "all-to-all" (default), "deepep" or
            "hybridep".
        ulysses: Ranks of cp that exchange heads by all-to-all, inside of a ring of cp / ulysses.
            Default 1.
        expert_nodes: Most nodes to which a token is routed; 0 (default) for no limit.

    Examples:
        >>> layout = ParallelConfig(tp=8, pp=4, dp_replicate=2, schedule="interleaved", chunks=5)
        >>> layout.world_size
        64
    """

    tp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    rank_order: tuple[Axis, ...] = RANK_ORDER
    sequence_parallel: bool = False
    zero: Annotated[int, NumberLimits(0, 3, "ZeRO stage")] = 0
    schedule: Schedule = "1f1b"
    chunks: int = 1
    layers_per_stage: tuple[Natural, ...] | None = None
    overlap: frozenset[str] = frozenset()
    context_kind: ContextKind = field(default="ring", metadata={KEY: "context"})
    reshard_after_forward: Reshard = "default"
    scatter_gather: bool = False
    split_vocab: bool = True
    root_unit: bool = False
    sum_once: bool = False
    bucket_bytes: int = 0
    dispatcher: Dispatcher = "all-to-all"
    ulysses: int = 1
    expert_nodes: Natural = 0

    @property
    def dp(self) -> int:
        """Data-parallel ranks: those that process different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shard_replicas(self) -> int:
        """Groups of ranks that each hold all the states that ZeRO shards: HSDP's replicas, or
        Megatron-LM's num-distributed-optimizer-instances."""
        return self.dp_replicate if self.zero == 3 or self.dp_shard > 1 else 1

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO shards the states of dense parameters (N); 1 without ZeRO."""
        return 1 if self.zero == 0 else self.cp * self.dp // self.shard_replicas

    @property
    def shard_axis(self) -> str:
        """Axis of the ranks over which ZeRO shards the states of dense parameters."""
        return "dp_shard" if self.zero == 3 or self.shard_replicas > 1 else "dp"

    @property
    def gradient_ranks(self) -> int:
        """Ranks of the gradient reduction of dense parameters."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks with the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO shards the states of experts; 1 without ZeRO."""
        if self.zero == 0:
            return 1
        return max(1, self.expert_dp // self.shard_replicas)

    @property
    def sequence_split(self) -> int:
        """Ranks over which sequence parallelism splits the activations outside of tp regions."""
        return self.tp if self.sequence_parallel else 1

    @property
    def vocab_split(self) -> int:
        """Ranks over which tensor parallelism shards embedding and head."""
        return self.tp if self.split_vocab else 1

    @property
    def ring(self) -> int:
        """Ranks over which ring attention passes keys and values; 1 without it."""
        return self.cp // self.ulysses if self.context_kind == "ring" else 1

    @property
    def stages_per_rank(self) -> int:
        """Model stages (chunks) on one pipeline rank."""
        if self.pp > 1 and self.schedule in TWO_STAGES:
            return 2
        return self.chunks

    @property
    def model_stages(self) -> int:
        """Stages into which the model is divided: p v, p for each of dualpipe's two copies."""
        return self.pp if self.schedule == "dualpipe" else self.pp * self.stages_per_rank


# JobConfig: everything that a prediction needs, and the sizes that follow by division.


@dataclass(frozen=True, slots=True)
class JobConfig:
    """A training job whose step is to be predicted.

    Args:
        model: The model's architecture.
        parallel: The parallel layout.
        training: Batch, precision, optimizer and recomputation.
        hardware: Accelerator and links.
        stated: The keys that its job.toml states ("training.fused_loss"); None (default) for a job
            that code builds, which states all.
        notes: What of its job.toml was read as which key: other programs' names of keys, and what
            was taken for sizes of a model by numbers.
        unsaid: Keys that the kinds of its files have no word for, so that leaving them out says
            nothing ("training.recompute" of DeepSpeed's JSON).

    Examples:
        >>> from stepsplit.analyzer import predict, read_job
        >>> job = read_job("job.toml")
        >>> predict(job).fits
        True
    """

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    hardware: HardwareConfig
    stated: frozenset[str] | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    unsaid: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def profile(self) -> FrameworkProfile:
        """What the job's framework does."""
        return load_framework(self.training.framework)

    @property
    def microbatches(self) -> int:
        """Microbatches per step and rank (m); with dualpipe those of both directions."""
        return self.training.global_batch // (self.training.micro_batch * self.parallel.dp)

    @property
    def runs_transformers(self) -> bool:
        """Whether a model of transformers runs as it is, perhaps in DistributedDataParallel: ddp
        with RMS norms, unless the job states its kernels."""
        kind = self.profile.model.transformers
        is_plain = self.training.unfused is None and self.model.norm == "rms"
        return kind == "always" or (kind == "plain" and is_plain)

    @property
    def offloaded(self) -> frozenset[str]:
        """The states in host memory; none on a CPU, which is its own host."""
        return frozenset() if load_device(self.hardware.family).processor else self.training.offload

    @property
    def is_fsdp(self) -> bool:
        """Whether weights are gathered unit by unit: ZeRO-3, and FSDP2 with stage 2, which keeps
        them until the backward."""
        return self.parallel.zero >= self.profile.messages.weights_sharded_from

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank, not divided by tp (T = s b / c)."""
        return self.training.seq_len * self.training.micro_batch // self.parallel.cp

    @property
    def padded_vocab(self) -> int:
        """The vocabulary as the framework pads it."""
        multiple = self.profile.model.vocabulary_multiple * self.parallel.tp
        return -(-self.model.vocab // multiple) * multiple if multiple else self.model.vocab
