"""Mistakes about GPUs, made again: `python -m campaigns.gpu_mutations [NAME...]`, from the repository's root.

Each puts back one that gossamer once made, or takes away what keeps it from being made, in a copy of the source. The tests
without a GPU must fail then. Prints which did not, and which could not be made because the source reads otherwise now.
"""

import sys

from campaigns.mutating import Mutation, main

RECIPES, NCCL, FACTORIES, OPTIONS = (
    f"tests/gpu/test_{name}.py" for name in ("recipes", "nccl", "factories", "options")
)
COMPILED, CODE = "tests/kernels/test_compiled.py", "test_the_code_does_what_the_reference_does_and_no_more"


MUTATIONS = (
    Mutation("1 generator's type", "fabrics/torch/stream.py", '"GeneratorType[Any, Any, Any]"', "GeneratorType[Any, Any, Any]", f"{RECIPES}::test_it_trains[allreduce]"),
    Mutation("2 a message on the CPU", "mixers/push_sum.py", "buffers.of(_length(x), x.device)", 'buffers.of(_length(x), torch.device("cpu"))', f"{RECIPES}::test_it_trains[sgp]"),
    Mutation("2 sends before receives", "fabrics/torch/nccl.py", "group._start_coalescing()", "pass", f"{RECIPES}::test_it_trains[sgp]"),
    Mutation("20 a send in one group with its answer", "exchanges/gtopk.py", "send(other, sums.wire(block))", "send(other, sums.wire(block), [(other, len(chosen) * _PAIR)])", f"{RECIPES}::test_it_trains[gtopk]"),
    Mutation("20 a search that never ends", "integrations/checks/introspection.py", "    while frame is not None and frame.f_code is not code:", "    frame = frame or sys._getframe(1)\n    while frame is not None and frame.f_code is not code:", "tests/integrations/test_introspection.py::test_a_backward_pass_may_be_the_outermost_frame[True-False]"),
    Mutation("3 rates on the CPU", "schedules/quorum.py", "copied_to(mine.rates, mine.gradient.device)", "mine.rates", f"{RECIPES}::test_it_trains[backup]"),
    Mutation("3 gradients read before they are written", "core/stream_events.py", "torch.cuda.current_stream(device).record_event()", "torch.cuda.Event()", f"{RECIPES}::test_there_are_no_races[backup]"),
    Mutation("4 the path follows the name", "fabrics/torch/endpoint.py", 'has.get("cuda") == "nccl"', 'dist.get_backend(group) == "nccl"', f"{NCCL}::test_it_trains_under_nccls_rules[qsgd() on 3 ranks, eager, undefined]"),
    Mutation("5 a block let go too early", "fabrics/torch/stream.py", "self._given = list(_given(program))", "self._given = list[Any]()", f"{RECIPES}::test_memory_is_kept_until_streams_have_met[osgp]"),
    Mutation("7 lanes on the current device", "fabrics/torch/stream.py", "    torch.cuda.set_device(device)\n    return torch.cuda.Stream(device, priority=-1)", "    return torch.cuda.Stream(priority=-1)", f"{NCCL}::test_nobody_need_set_a_device[qsgd]"),
    Mutation("7 the current device asked for", "fabrics/torch/stream.py", "torch.cuda.Stream(device, priority=-1)", "torch.cuda.Stream(priority=-1)", f"{FACTORIES}::test_nobody_asks_for_the_current_device[fabrics/torch/stream.py]"),
    Mutation("8 communicators left behind", "fabrics/torch/nccl.py", "held, self._group = [self._group], None", "held, self._group = [None], None", f"{NCCL}::test_no_communicator_is_left[allreduce]"),
    Mutation("8 torch ends the process", "fabrics/torch/nccl.py", '"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"', '"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"', "tests/fabrics/test_nccl_failures.py::test_torch_does_not_end_the_process_when_nccl_notices_that_a_peer_is_gone"),
    Mutation("9 a checkpoint stays on the CPU", "runtime/succession.py", 'bucket.device if tensor.dim() else "cpu"', '"cpu"', f"{NCCL}::test_a_checkpoint_on_the_cpu_resumes[powersgd]"),
    Mutation("10 CUDA tensors given to gloo", "fabrics/torch/endpoint.py", '"gloo" in has.values()', "False", f"{NCCL}::test_it_trains_over_staged_gloo[allreduce]"),
    Mutation("10 sent before it was copied", "fabrics/torch/staged.py", "copied.synchronize()", "pass", f"{NCCL}::test_it_trains_over_staged_gloo[allreduce]"),
    Mutation("11 a question a bucket", "runtime/averaging.py", "read_numbers(*peaks, *also)", "[float(p) for p in (*peaks, *also)]", f"{RECIPES}::test_the_host_waits_once_a_step[allreduce]"),
    Mutation("11 a question in the lane", "runtime/averaging.py", "return mean, found[0].view(()).double() if found else peak(mean)", "return mean, mean.new_tensor(float(peak(mean)))", f"{RECIPES}::test_no_lane_waits[allreduce]"),
    Mutation("12 launches a parameter", "integrations/grad_buckets.py", "slot.copy_(gradient", "slot.zero_().add_(1).sub_(1).copy_(gradient", f"{NCCL}::test_launches_do_not_grow[allreduce]"),
    Mutation("6 a constant set twice", "kernels/gpu/quantise.py", "        if BITS & (8 >> step):\n            byte, length", "        if BITS & (8 >> step):\n            WIDTH: tl.constexpr = 8 >> step\n            byte, length", f"{COMPILED}::test_every_program_compiles_for_every_argument"),
    Mutation("14 divisions in 64 bits", "kernels/gpu/quantise.py", "first // BUCKET + bucket_of(first, place, BUCKET), mask=place < left", "(first + place) // (scale.to(tl.int64) * BUCKET), mask=place < left", f"{COMPILED}::{CODE}[nothing is divided in 64 bits]"),
    Mutation("14 registers spilled", "kernels/gpu/scales.py", "_STRETCH = 4096", "_STRETCH = 65536", f"{COMPILED}::{CODE}[no register is spilled to memory]"),
    Mutation("16 divided by a plain number", "kernels/layout.py", "divisor(top, scales.device)", "top", "tests/gpu/test_device.py::test_what_a_level_is_worth_is_the_same_on_gpus"),
    Mutation("16 products and sums fused", "kernels/gpu/__init__.py", '"enable_fp_fusion": False', '"enable_fp_fusion": True', f"{COMPILED}::{CODE}[nobody may fuse what the reference multiplies and adds]"),
    Mutation("19 no options for a program", "kernels/gpu/sign.py", "_read[grid](wire, table, units, out, n, count, steps, anew, _READ, **OPTIONS)", "_read[grid](wire, table, units, out, n, count, steps, anew, _READ)", f"{COMPILED}::{CODE}[nobody may fuse what the reference multiplies and adds]"),
    Mutation("19 compiled in the first step", "integrations/joining.py", "    warm([plan.recipe, *plan.recipe.reached], fabric.device, worker.buckets[0].layout.dtype)", "    pass", f"{OPTIONS}::test_kernels_are_compiled_before_the_first_step"),
    Mutation("19 no way back to torch", "kernels/backends.py", "_verdicts[device] = _try_triton(device)", "_verdicts[device] = True", "tests/kernels/test_backends.py::test_a_triton_that_cannot_launch_is_told_of_once_and_not_used"),
    Mutation("19 a graph is captured", "integrations/checks/wrappers.py", 'device.type == "cuda" and torch.cuda.is_current_stream_capturing()', "False", f"{OPTIONS}::test_graphs_and_compiled_autograd_are_refused"),
    Mutation("19 places in 32 bits", "runtime/buckets.py", "layout.numel > LONGEST", "False", "tests/runtime/test_buckets.py::test_blocks_that_cannot_be_cut_are_not_longer_than_their_indices_count"),
    Mutation("factories", "integrations/handshake.py", "torch.tensor(list(words), dtype=torch.uint8, device=device)", "torch.tensor(list(words), dtype=torch.uint8)", f"{FACTORIES}::test_whoever_makes_a_tensor_says_where[integrations/handshake.py]"),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(MUTATIONS, sys.argv[1:]))
