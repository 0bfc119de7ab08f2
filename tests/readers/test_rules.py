"""Kernel rules: the built-in rules, a user's rules, and errors of an invalid file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.reading import on_disk

from stepsplit.analyzer import (
    DataError,
    FamilyRule,
    KernelRule,
    KinetoFile,
    Rules,
    examine,
    read_rules,
)
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, BUILT_IN_FILE, read_own_rules
from stepsplit.analyzer.readers.kineto import cache, reader
from stepsplit.analyzer.readers.kineto.reader import read_cached
from stepsplit.dashboard import cli

NORM = "void at::native::batch_norm_gather_stats_kernel<float>(int, float const*)"


@pytest.mark.parametrize(
    ("name", "kind", "op"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "communication", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication",
         "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication", "unknown"),
        ("ncclSymkDevKernel_ReduceScatter_LD_sum_f32", "communication", "reduce_scatter"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "communication", "unknown"),
        ("__amd_rocclr_copyBuffer.kd", "copy", "unknown"),
        ("__amd_rocclr_fillBufferAligned.kd", "copy", "unknown"),
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", "communication",
         "unknown"),
        ("mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*)", "communication", "unknown"),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)", "communication", "all_to_all"),
        ("void dpsk::ep::internode::combine<true>(int4*)", "communication", "all_to_all"),
        ("void deep_ep::internode_ll::dispatch<true, 4>(void*)", "communication", "all_to_all"),
        ("_ZN7deep_ep9intranode15notify_dispatchILi8EEEvPKi", "communication", "all_to_all"),
        ("void ep::intranode::cached_notify_combine<8>(void**)", "communication", "all_to_all"),
        ("_ZN9hybrid_ep15dispatch_kernelILi16ELi4EEEvPv", "communication", "all_to_all"),
        ("_ZN9hybrid_ep18device_sync_kernelILi8EEEvPv", "communication", "all_to_all"),
        ("_ZN4mori3moe25EpDispatchIntraNodeKernelIfEEvPv", "communication", "all_to_all"),
        ("_ZN4c10d16symmetric_memory14barrier_kernelEPPjmii", "communication", "barrier"),
        ("mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>", "communication", "all_to_all"),
        ("void tensorrt_llm::kernels::moe_comm::moeAllToAllKernel<2>", "communication",
         "all_to_all"),
        ("nvshmemi_proxy_barrier_all_kernel", "communication", "barrier"),
        ("rocshmem_broadcast_kernel", "communication", "broadcast"),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>",
         "communication", "all_reduce"),
        ("void one_shot_all_reduce_kernel<float, 4, 8>(float**)", "communication", "all_reduce"),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**)", "communication", "barrier"),
        ("void tensorrt_llm::kernels::twoShotAllReduceKernel<half, 8>", "communication",
         "all_reduce"),
        ("void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8>",
         "communication", "all_reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>",
         "communication", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>", "communication", "all_reduce"),
        ("void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot>", "communication",
         "all_reduce"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<4>", "communication", "unknown"),
        ("kuserbuffers_pushsend", "communication", "unknown"),
        ("hcclAllReduce", "communication", "all_reduce"),
        ("hcom_allGather__503_0_1", "communication", "all_gather"),
        ("oneccl_allreduce_pcie<sycl::half>", "communication", "all_reduce"),
        ("Memcpy PtoP (Device -> Device)", "communication", "unknown"),
        ("cutlass_fused_all_gather_matmul_sm90", "fused", ""),
        ("kernel_gemm_rs_persistent", "fused", ""),
        ("void deep_ep::layout::get_dispatch_layout<256>(long const*)", "compute", ""),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "compute", ""),
        (NORM, "compute", ""),
        ("void cub::DeviceReduceKernel<Policy, float*>", "compute", ""),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 4>", "compute", ""),
        ("hipblasLt_gemm_Cijk_Ailk_Bljk_BBS_BH_MT128x128x64", "compute", ""),
        ("void hipcub::DeviceReduceSingleTileKernel<float>", "compute", ""),
        ("triton_poi_fused_all_gather_into_tensor_wait_tensor_3", "compute", ""),
        ("triton_red_fused_all_reduce_symm_mem_add_2", "compute", ""),
        ("void flash::flash_fwd_splitkv_combine_kernel<Traits>", "compute", ""),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "compute", ""),
        ("void broadcast_gradient_args_kernel<int>", "compute", ""),
        ("fused_adamw_dmask", "compute", ""),
        ("Memcpy DtoD (Device -> Device)", "compute", ""),
    ],
)  # fmt: skip
def test_real_kernel_names_are_classified(name: str, kind: str, op: str) -> None:
    assert BUILT_IN.classify_kernel(name) == kind
    assert BUILT_IN.is_communication(name) == (kind == "communication")
    if kind == "communication":
        assert BUILT_IN.find_op(name) == op


@pytest.mark.parametrize(
    ("name", "family"),
    [
        # "_bN_" is a bias, and no batch norm.
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN"
         "_transOut_schedP2x1x2x3_biasM_bN_tma_tmaOpt_clmp_swiGlu_dynBatch_sm100f", "gemm"),
        ("bmm_Bfloat16_E2m1E2m1_Fp32_Ab16_Bb16_t128x8x512_s5_et128x8_m128x8x64_c1x1x1_rM_TN"
         "_transOut_schPd2x1x2x3_biasFp32M_bN_rgTma_clmp_dynB_sm100f", "gemm"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int>", "normalization"),
        ("gemm_bn_relu_kernel", "normalization"),
    ],
)  # fmt: skip
def test_real_kernel_names_have_a_family(name: str, family: str) -> None:
    assert BUILT_IN.find_family(name) == family


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    return path


def test_rules_are_in_file_order(tmp_path: Path) -> None:
    text = """
        schema = "stepsplit.rules/1"
        [[kernel]]
        match = 'ring_\\w+'
        is = "communication"
        op = "all_gather"
        [[kernel]]
        match = "ring"
        is = "compute"
        [[family]]
        match = "ring"
        family = "rings"
    """
    found = read_own_rules(written(tmp_path, text))
    assert found == Rules(
        (KernelRule(r"ring_\w+", "communication", "all_gather"), KernelRule("ring", "compute")),
        (FamilyRule("ring", "rings"),),
    )
    assert [found.classify_kernel(name) for name in ("RING_x", "ring", "gemm")] == [
        "communication", "compute", "compute",
    ]  # fmt: skip
    assert [found.find_family(name) for name in ("Ring", "gemm")] == ["rings", "other"]


def test_a_users_rules_come_before_the_built_in_ones_which_stay(tmp_path: Path) -> None:
    text = '[[kernel]]\nmatch = "^ncclDevKernel_Mine"\nis = "compute"\n'
    text += '[[kernel]]\nmatch = "batch_norm_gather"\nis = "communication"\n'
    found = read_rules(written(tmp_path, text))
    assert found.classify_kernel("ncclDevKernel_Mine(int)") == "compute"
    assert found.classify_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL") == "communication"
    assert (found.classify_kernel(NORM), found.find_op(NORM)) == ("communication", "gather")
    assert found.find_family("nvjet_hsh") == "gemm"


@pytest.mark.parametrize("match", ["mykernel", "MyKernel", r"\x4dykernel", r"My\w+el", "[L-N]yk"])
def test_rules_match_case_insensitively(tmp_path: Path, match: str) -> None:
    found = read_rules(written(tmp_path, f"[[kernel]]\nmatch = '{match}'\nis = 'fused'\n"))
    names = ("void mykernel<1>", "MYKERNEL", "MyKernel")
    assert [found.classify_kernel(name) for name in names] == ["fused"] * 3
    assert found.classify_kernel("my_other") == "compute"


def test_an_empty_file_adds_nothing(tmp_path: Path) -> None:
    assert read_rules(written(tmp_path, "")) == BUILT_IN


def test_the_built_in_rules_are_a_valid_user_file() -> None:
    assert read_own_rules(BUILT_IN_FILE) == BUILT_IN


def test_rules_can_be_sent_to_another_process() -> None:
    arrived = pickle.loads(pickle.dumps(BUILT_IN))
    assert arrived == BUILT_IN
    assert arrived.is_communication("ncclDevKernel_Generic")


KERNEL = '[[kernel]]\nmatch = "x"\nis = "compute"\n'


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("kernel =", "not valid TOML", "docs/rules.md"),
        ('schema = "stepsplit.rules/9"', "schema: 'stepsplit.rules/9'", "this version's format"),
        ('[[kernels]]\nmatch = "x"', "kernels: unknown key", "kernel, family"),
        ('kernel = "x"', "kernel: not a list of tables", "[[kernel]]"),
        (KERNEL + '[[kernel]]\nmatch = "x"', "kernel[1].is: None", "compute, copy, fused"),
        ('[[kernel]]\nmatch = "a(b"\nis = "fused"', "kernel[0].match: 'a(b'", "fix the pattern"),
        ('[[kernel]]\nmatch = "a(?i)b"\nis = "fused"', "not a regular expression", "the pattern"),
        ('[[kernel]]\nmatch = "x[[a]"\nis = "fused"', "not a regular expression", "the pattern"),
        ('[[kernel]]\nmatch = "x*"\nis = "fused"', "matches every name", "fix the pattern"),
        ('[[kernel]]\nmatch = \'(a)\\1\'\nis = "fused"', "refers to a group", "references"),
        ('[[kernel]]\nmatch = 7\nis = "fused"', "kernel[0].match: 7", "in quotes"),
        (KERNEL + "op = 'send'",
         "kernel[0].op: not allowed for a kernel that is compute", "leave op out"),
        ('[[kernel]]\nmatch = "x"\nis = "communication"\nop = "allreduce"',
         "kernel[0].op: 'allreduce' is unknown", "all_reduce"),
        (KERNEL + "family = 'gemm'", "kernel[0].family: unknown key", "match, is, op"),
        ('[[family]]\nmatch = "x"', "family[0].family: None", "name a family"),
    ],
)  # fmt: skip
def test_an_invalid_file_gives_one_line_with_key_and_hint(
    tmp_path: Path, text: str, problem: str, hint: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_rules(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert problem in line
    assert hint in line
    assert "\n" not in line


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.toml: No such file"):
        read_rules(tmp_path / "none.toml")


def test_a_recording_is_split_by_the_given_rules(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 20).kernel("gemm", 0, 8).kernel("my_exchange", 8, 12, stream=20)
    trace.kernel("my_gemm_and_send", 12, 20)
    file = trace.write(tmp_path)
    text = '[[kernel]]\nmatch = "my_exchange"\nis = "communication"\nop = "all_to_all"\n'
    text += '[[kernel]]\nmatch = "gemm_and"\nis = "fused"\n'
    rules = read_rules(written(tmp_path, text))
    [plain], [ruled] = examine([file]).report.steps, examine([file], rules=rules).report.steps
    assert (plain.compute_ns, plain.collective_ns, plain.fused_ns) == (20_000, 0, 0)
    assert (ruled.compute_ns, ruled.collective_ns, ruled.fused_ns) == (16_000, 4_000, 8_000)


def test_the_command_line_takes_a_file_of_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = GpuTrace().step(1, 0, 20).kernel("gemm", 0, 8).kernel("mine", 8, 20).write(tmp_path)
    rules = written(tmp_path, '[[kernel]]\nmatch = "mine"\nis = "communication"\n')
    assert cli.run(["analyze", str(file), "--rules", str(rules), "--json", "-"]) == 0
    [step] = json.loads(capsys.readouterr().out)["steps"]
    assert (step["compute_ns"], step["collective_ns"]) == (8_000, 12_000)
    assert cli.run(["analyze", str(file), "--rules", str(written(tmp_path, "rule = 1"))]) == 2
    assert "rule: unknown key" in capsys.readouterr().err


def test_traces_cached_under_other_rules_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LEAST_CACHED_BYTES", 0)
    file = GpuTrace().step(1, 0, 20).kernel("my_exchange", 8, 12).write(tmp_path)
    text = '[[kernel]]\nmatch = "my_exchange"\nis = "communication"\n'
    rules = read_rules(written(tmp_path, text))
    assert [_calls(read_cached(on_disk(file), one)) for one in (BUILT_IN, rules)] == [0, 1]
    assert cache.load(on_disk(file), file, BUILT_IN) is None
    assert _calls(cache.load(on_disk(file), file, rules)) == 1


def test_family_rules_do_not_invalidate_the_cache(tmp_path: Path) -> None:
    text = '[[family]]\nmatch = "mine"\nfamily = "mine"\n'
    assert read_rules(written(tmp_path, text)).reading_key == BUILT_IN.reading_key


def _calls(found: KinetoFile | None) -> int:
    assert found is not None
    assert found.calls is not None
    return len(found.calls.calls)
