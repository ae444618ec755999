"""Operations and traffic of kernels: `planning.kernels` on texts of real compilers, against
formulas.
"""

import pytest

from solrl_jax.planning import hlo
from solrl_jax.planning.kernels import Kernel, count_library_kernels, kernels
from tests.planning.programs import text


def read(name: str) -> list[Kernel]:
    return kernels(hlo.parse(text(name)))


def named(name: str, part: str) -> Kernel:
    (kernel,) = [kernel for kernel in read(name) if part in kernel.name]
    return kernel


def test_a_block_scaled_product_is_native_on_blackwell():
    """Its 64 columns are padded to 128, and its operands are packed."""
    kernel = named("nvfp4-b200", "blockScaledDot")
    assert (kernel.name, kernel.kind, kernel.unit) == (
        "__cudnn$blockScaledDot f4e2m1fn",
        "matmuls",
        "fp4",
    )
    assert kernel.operations == 2 * 128 * 128 * 256
    scales = 2 * 128 * 16  # rows are padded to 128 and blocks to 16 for both operands
    assert kernel.moved == 2 * 128 * 256 / 2 + 2 * scales / 2 + 2 * 128 * 128
    assert count_library_kernels(read("nvfp4-b200")) == {kernel.name: 1}


def test_a_block_scaled_product_is_expanded_on_hopper():
    kernel = named("nvfp4-h200", "matmul")
    assert (kernel.name, kernel.unit) == ("__cublas$lt$matmul bf16", "bf16")
    assert kernel.operations == 2 * 128 * 64 * 256
    assert kernel.moved == 2 * (128 * 256 + 64 * 256 + 128 * 64)  # without the workspace


def test_products_of_a_loop_are_counted_as_often_as_they_run():
    kernel = named("fp8-h200", "matmul")
    assert (kernel.name, kernel.unit, kernel.times) == ("__cublas$lt$matmul$f8 f8e4m3fn", "fp8", 3)
    assert kernel.operations == 2 * 128 * 256 * 256
    assert kernel.moved == 128 * 256 + 256 * 256 + 4 * 128 * 256 + 8  # and two scales


@pytest.mark.parametrize(
    ("name", "product", "moved"),
    [
        ("int8-a100", "__cublas$lt$matmul s8", 512 * 256 + 256 * 256 + 4 * 512 * 256),
        ("int8-tpu-v5e", "fusion s8", 256 * 256 + 4 * (512 + 256) + 2 * 512 * 256),
    ],
)
def test_a_product_of_int8_is_counted_at_its_own_rate(name, product, moved):
    """cuBLAS writes sums of four bytes. The compiler of TPUs scales them in the fusion of the
    product, whose activations are in the TPU's own memory.
    """
    (kernel,) = [kernel for kernel in read(name) if kernel.kind == "matmuls"]
    assert (kernel.name, kernel.unit, kernel.times) == (product, "int8", 1)
    assert (kernel.operations, kernel.moved) == (2 * 512 * 256 * 256, moved)


def test_a_loop_reads_a_slice_of_what_is_stacked_and_writes_a_slice():
    """Of three matrices [256, 256] one, and of three results [128, 256] one; the number of the turn
    comes on top.
    """
    sliced = [kernel.moved for kernel in read("fp8-h200") if "dynamic_slice" in kernel.source]
    updated = [
        kernel.moved for kernel in read("fp8-h200") if "dynamic_update_slice" in kernel.source
    ]
    assert sliced == [2 * 256 * 256 + 4]
    assert updated == [2 * 2 * 128 * 256 + 4]


def test_flash_attention_has_two_products_forwards_and_five_backwards():
    forwards, backwards = (kernel for kernel in read("attend-b200") if kernel.kind == "attention")
    scores = 2 * 4 * 256 * 256
    one = 2 * 2 * 256 * 4 * 64
    assert (forwards.name, backwards.name) == ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    assert (forwards.operations, backwards.operations) == (2 * 2 * scores * 64, 5 * 2 * scores * 64)
    logarithms = 4 * 2 * 4 * 256
    assert (forwards.moved, backwards.moved) == (4 * one + logarithms, 8 * one + logarithms)


def test_convolutions_count_what_they_read_of_the_input():
    """cuDNN is given a padded input: 9 taps for each of 16 x 16 outputs, forwards and for the
    gradient.
    """
    products = [kernel for kernel in read("convolve-h200") if kernel.kind == "matmuls"]
    assert [kernel.name for kernel in products] == [
        "__cudnn$convForward bf16",
        "__cudnn$convBackwardInput bf16",
    ]
    assert [kernel.operations for kernel in products] == [2 * 2 * 16 * 16 * 9 * 16 * 32] * 2


def test_padding_and_dilation_multiply_nothing():
    """Three taps along five elements, one of padding at either end; and a window that meets one
    element in two.
    """
    line = (
        "  ROOT %c = f32[1,5,1]{2,1,0} convolution(%x, %k), window={size=3 pad=1_1}, "
        "dim_labels=b0f_0io->b0f\n"
    )
    module = f"""HloModule c

ENTRY %main (x: f32[1,5,1], k: f32[3,1,1]) -> f32[1,5,1] {{
  %x = f32[1,5,1]{{2,1,0}} parameter(0)
  %k = f32[3,1,1]{{2,1,0}} parameter(1)
{line}}}
"""
    (kernel,) = kernels(hlo.parse(module))
    assert (kernel.operations, kernel.unit) == (2 * (5 * 3 - 2), "tf32")
    spread = module.replace("f32[1,5,1]{2,1,0} convolution", "f32[1,9,1]{2,1,0} convolution")
    (kernel,) = kernels(hlo.parse(spread.replace("pad=1_1", "pad=1_1 lhs_dilate=2")))
    assert kernel.operations == 2 * (9 + 4)  # of 9 outputs, 5 meet one element and 4 meet two


def test_a_tpus_batched_product_is_no_larger_for_being_a_convolution():
    kernel = named("batched-tpu-v6e", "fusion")
    assert (kernel.kind, kernel.unit, kernel.times) == ("matmuls", "bf16", 4)
    assert kernel.operations == 2 * 8 * 256 * 128 * 128
    assert (
        kernel.moved == 2 * 8 * 128 * 128
    )  # the weights: what is carried stays in the TPU's own memory


def test_attention_in_pallas_is_counted_by_its_shapes():
    line = """HloModule p

ENTRY %main (q: bf16[2,8,64,32], k: bf16[2,8,16,32]) -> bf16[2,8,64,32] {
  %q = bf16[2,8,64,32]{3,2,1,0} parameter(0)
  %k = bf16[2,8,16,32]{3,2,1,0} parameter(1)
  ROOT %a = bf16[2,8,64,32]{3,2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", metadata={op_name="NAME"}
}
"""
    one = 2 * 2 * 8 * 64 * 16 * 32
    for name, products in (("splash_mha_fwd", 2), ("splash_mha_dkv", 4), ("flash_mha_bwd_dq", 3)):
        (kernel,) = kernels(hlo.parse(line.replace("NAME", name)))
        assert (kernel.kind, kernel.operations) == ("attention", products * one), name
    stated = line.replace('"NAME"}', '"other"}, backend_config={"cost_estimate":{"flops":"1234"}}')
    (kernel,) = kernels(hlo.parse(stated))
    assert (kernel.name, kernel.kind, kernel.operations) == (
        "tpu_custom_call bf16",
        "matmuls",
        1234,
    )


def test_a_function_without_results_multiplies_nothing():
    call = """HloModule c

ENTRY %main (x: bf16[64,32]) -> bf16[64,32] {
  %x = bf16[64,32]{1,0} parameter(0)
  %print = () custom-call(%x), custom_call_target="callback", custom_call_has_side_effect=true
  ROOT %y = bf16[64,32]{1,0} add(%x, %x)
}
"""
    printed = next(k for k in kernels(hlo.parse(call)) if k.name.startswith("callback"))
    assert (printed.operations, printed.result) == (0.0, "")


@pytest.mark.parametrize(
    ("name", "count"), [("train-h200", 15), ("attend-b200", 2), ("batched-tpu-v6e", 0)]
)
def test_functions_of_libraries_are_counted_by_name(name, count):
    assert sum(count_library_kernels(read(name)).values()) == count


FUSED = """HloModule fused

%with_slices (p0: bf16[20,64,32], p1: s32[], p2: bf16[128,64], p3: bf16[20,128,32]) -> (bf16[20,128,32], s8[4096]) {
  %p0 = bf16[20,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[128,64]{1,0} parameter(2)
  %p3 = bf16[20,128,32]{2,1,0} parameter(3)
  %zero = s32[] constant(0)
  %slice = bf16[1,64,32]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,32}
  %weights = bf16[64,32]{1,0} bitcast(%slice)
  %product = (bf16[128,32]{1,0}, s8[4096]{0}) custom-call(%p2, %weights), custom_call_target="__cublas$lt$matmul",
    backend_config={"lhs_contracting_dimensions":["1"]}
  %value = bf16[128,32]{1,0} get-tuple-element(%product), index=0
  %layer = bf16[1,128,32]{2,1,0} bitcast(%value)
  %stack = bf16[20,128,32]{2,1,0} dynamic-update-slice(%p3, %layer, %p1, %zero, %zero)
  %workspace = s8[4096]{0} get-tuple-element(%product), index=1
  ROOT %both = (bf16[20,128,32]{2,1,0}, s8[4096]{0}) tuple(%stack, %workspace)
}

%one_layer (q0: bf16[20,64,32], q1: s32[]) -> bf16[1,64,32] {
  %q0 = bf16[20,64,32]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %none = s32[] constant(0)
  ROOT %taken = bf16[1,64,32]{2,1,0} dynamic-slice(%q0, %q1, %none, %none), dynamic_slice_sizes={1,64,32}
}

ENTRY %main (a: bf16[20,64,32], i: s32[], x: bf16[128,64], s: bf16[20,128,32]) -> (bf16[20,128,32], s8[4096]) {
  %a = bf16[20,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[128,64]{1,0} parameter(2)
  %s = bf16[20,128,32]{2,1,0} parameter(3)
  %begun = ((bf16[20,64,32]{2,1,0}, s32[]), bf16[1,64,32]{2,1,0}, u32[]) fusion-start(%a, %i), kind=kLoop, calls=%one_layer
  %ended = bf16[1,64,32]{2,1,0} fusion-done(%begun)
  ROOT %fused = (bf16[20,128,32]{2,1,0}, s8[4096]{0}) fusion(%a, %i, %x, %s), kind=kCustom, calls=%with_slices
}
"""


def test_a_library_fused_with_slices_is_that_library():
    """As XLA of JAX 0.11 prints them: of stacks, one layer is read and one is written, and the
    workspace is nobody's.
    """
    layer, product = kernels(hlo.parse(FUSED))
    assert (product.name, product.kind, product.result) == (
        "__cublas$lt$matmul bf16",
        "matmuls",
        "bf16[128,32]",
    )
    assert product.operations == 2 * 128 * 32 * 64
    assert product.moved == 2 * (64 * 32 + 128 * 64 + 128 * 32) + 4
    assert (layer.kind, layer.moved) == ("memory", 2 * 2 * 64 * 32 + 4)
