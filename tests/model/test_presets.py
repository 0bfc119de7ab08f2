from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import (
    Efficiency,
    Experts,
    HardwareConfig,
    LatentAttention,
    Link,
    ModelConfig,
)
from stepsplit.analyzer.model.config_decode import read_table
from stepsplit.analyzer.model.hardware_config import (
    list_families,
    list_link_names,
    load_efficiency,
    load_hardware,
    load_link,
)
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.parameters import count_parameters
from stepsplit.analyzer.model.preset_names import (
    MODELS,
    PRESETS,
    list_hardware_names,
    list_model_names,
    read_preset,
)

COUNTED = {
    name: int(preset["parameters"])
    for name in list_model_names()
    if "parameters" in (preset := read_preset(MODELS, "model", name).values)
}
"""The published number of parameters of each preset that has one."""


def test_a_llama_has_groups_of_heads_and_a_gated_mlp() -> None:
    assert load_model("llama-3.1-8b") == ModelConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        ffn=14336,
        vocab=128256,
        gated=True,
        tied=False,
        norm="rms",
        biases=False,
        name="llama-3.1-8b",
    )


def test_a_gpt_has_learned_positions_biases_and_a_tied_head() -> None:
    assert load_model("gpt3-175b") == ModelConfig(
        layers=96,
        hidden=12288,
        heads=96,
        kv_heads=96,
        head_size=128,
        ffn=49152,
        vocab=50257,
        positions=2048,
        name="gpt3-175b",
    )


def test_deepseek_has_latent_attention_and_experts_after_three_dense_layers() -> None:
    model = load_model("deepseek-v3")
    assert (model.layers, model.hidden, model.heads, model.ffn) == (61, 7168, 128, 18432)
    assert model.experts == Experts(count=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3)
    assert model.latent == LatentAttention(
        query_rank=1536, kv_rank=512, nope=128, rope=64, value=128
    )


def test_every_model_preset_loads_under_its_own_name(subtests: pytest.Subtests) -> None:
    for name in list_model_names():
        with subtests.test(name):
            assert load_model(name).name == name


def test_a_preset_has_as_many_parameters_as_its_publishers_say(subtests: pytest.Subtests) -> None:
    for name, published in COUNTED.items():
        with subtests.test(name):
            assert count_parameters(load_model(name)) == pytest.approx(
                published, abs=max(0.001 * published, _half_of_the_last_digit(published))
            )


def _half_of_the_last_digit(count: int) -> float:
    """By how much a count may be rounded: 1_700_000_000 is 1.7 billion, give or take 0.05."""
    zeros = len(str(count)) - len(str(count).rstrip("0"))
    return 10.0**zeros / 2


def test_most_models_have_a_published_count() -> None:
    assert len(COUNTED) > 0.9 * len(list_model_names())


def test_a_gpu_has_dense_peaks_the_memory_that_its_driver_shows_and_links() -> None:
    assert load_hardware("a100-sxm-80gb") == HardwareConfig(
        name="a100-sxm-80gb",
        family="ampere",
        peaks_flops_per_s=(
            ("fp32", 19.5e12),
            ("tf32", 156e12),
            ("bf16", 312e12),
            ("fp16", 312e12),
        ),
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=2.039e12,
        gpus_per_node=8,
        intra=load_link("nvlink-3"),
        inter=load_link("ib-hdr-200"),
        host=load_link("host-pcie-4"),
        efficiency=load_efficiency("ampere"),
        multiprocessors=108,
        power_watts=400.0,
        peak_mhz=1410.0,
    )


def test_the_link_between_nodes_and_the_size_of_a_node_can_be_set() -> None:
    usual = load_hardware("h100-sxm")
    device = load_hardware("h100-sxm", nodes_link="roce-400", gpus_per_node=4)
    assert (usual.inter, usual.gpus_per_node) == (load_link("ib-ndr-400"), 8)
    assert (device.inter, device.gpus_per_node) == (load_link("roce-400"), 4)


def test_every_hardware_preset_loads_under_its_own_name(subtests: pytest.Subtests) -> None:
    for name in list_hardware_names():
        with subtests.test(name):
            device = load_hardware(name)
            assert device.name == name
            assert min(device.memory_bytes, device.memory_bytes_per_s, device.gpus_per_node) >= 1


def test_lower_precision_is_never_slower(subtests: pytest.Subtests) -> None:
    for name in list_hardware_names():
        with subtests.test(name):
            peaks = dict(load_hardware(name).peaks_flops_per_s)
            order = [peaks[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8") if dtype in peaks]
            assert order == sorted(order)


def test_a_ring_reaches_at_most_the_rate_of_the_link(subtests: pytest.Subtests) -> None:
    for name in list_link_names():
        with subtests.test(name):
            found = load_link(name)
            assert isinstance(found, Link) and found.name == name
            assert 0 < found.ring <= 1 and found.latency_ns > 0 and found.bytes_per_s > 0


def test_nvlink_rates_are_per_direction() -> None:
    assert [load_link(f"nvlink-{n}").bytes_per_s for n in (2, 3, 4, 5)] == [
        150e9,
        300e9,
        450e9,
        900e9,
    ]


def test_no_family_reaches_more_than_its_peaks(subtests: pytest.Subtests) -> None:
    for family in list_families():
        with subtests.test(family):
            found = load_efficiency(family)
            assert isinstance(found, Efficiency) and found.launch_ns >= 0
            assert 0 < max(found.gemm, found.attention, found.memory) <= 1


def test_an_unknown_model_suggests_similar_names() -> None:
    message = "unknown model preset 'llama-3-9b'; "
    message += "write llama-3-8b, llama-3-70b, llama-30b or llama-13b"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        load_model("llama-3-9b")


def test_an_unknown_gpu_or_link_suggests_similar_names() -> None:
    with pytest.raises(UsageError, match=r"^unknown hardware preset 'h100'; write h100-sxm, "):
        load_hardware("h100")
    with pytest.raises(UsageError, match=r"^unknown link 'ndr-400'; write ib-ndr-400, "):
        load_hardware("h100-sxm", nodes_link="ndr-400")


def test_every_number_has_a_source(subtests: pytest.Subtests) -> None:
    for file in sorted(PRESETS.rglob("*.toml")):
        with subtests.test(file.stem):
            assert list(_without_source(file.stem, read_table(file).values, sourced=False)) == []


def _without_source(name: str, table: Mapping[str, object], sourced: bool) -> Iterator[str]:
    """The tables that hold numbers whose source neither they nor the table around them name."""
    source = table.get("source")
    sourced = sourced or (isinstance(source, str) and len(source) > 10)
    if not sourced and any(isinstance(value, int | float) for value in table.values()):
        yield name
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _without_source(f"{name}.{key}", value, sourced)


def test_a_number_without_source_would_be_found() -> None:
    table = {"a": {"source": "a paper, table 1", "b": {"n": 1}}, "c": {"d": {"n": 1}}}
    assert list(_without_source("file", table, sourced=False)) == ["file.c.d"]
