"""The private PyTorch APIs behind ``hasten._torch_compat``: one test each."""

import copy
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.utils.data import DataLoader, Dataset

from hasten import _torch_compat as compat

# ── modules and tensors ──────────────────────────────────────────────────────────────────────────


def test_base_classes_cover_the_public_layers():
    assert issubclass(nn.BatchNorm2d, compat.BatchNorm) and issubclass(nn.SyncBatchNorm, compat.BatchNorm)
    assert not issubclass(nn.LayerNorm, compat.BatchNorm)
    assert issubclass(nn.ConvTranspose3d, compat.Convolution) and issubclass(nn.FeatureAlphaDropout, compat.Dropout)


def test_module_state_attributes_hold_all_tensors_and_submodules():
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert all(isinstance(vars(module)[name], dict) for name in compat.MODULE_STATE_ATTRIBUTES)
    assert list(vars(module)["_modules"]) == ["0"]


def test_lazily_imported_modules_exist():
    from importlib.util import find_spec

    assert all(find_spec(name) for name in compat.LAZILY_IMPORTED_MODULES)


def test_own_parameters_and_buffers_can_be_replaced():
    module = nn.BatchNorm1d(2)
    weight = nn.Parameter(torch.zeros(2))
    compat.own_parameters(module)["weight"] = weight
    assert module.weight is weight and set(compat.own_buffers(module)) == {n for n, _ in module.named_buffers()}


def test_fused_optimizers_skip_overflows():
    weights = [nn.Parameter(torch.zeros(2))]
    assert compat.skips_overflows(torch.optim.Adam(weights, fused=True))
    for other in (None, torch.optim.Adam(weights), torch.optim.SGD(weights, momentum=0.9, fused=True)):
        assert not compat.skips_overflows(other)


def test_allocator_settings_are_read():
    """Without a GPU nothing uses them."""
    compat.set_allocator_settings("expandable_segments:True")
    compat.set_allocator_settings("expandable_segments:False")
    with pytest.raises((RuntimeError, ValueError)):
        compat.set_allocator_settings("no such option")


def test_has_forward_hooks():
    module = nn.Linear(1, 1)
    assert not compat.has_forward_hooks(module)
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert compat.has_forward_hooks(module)
    handle.remove()
    module.register_forward_hook(lambda *_: None)
    assert compat.has_forward_hooks(module)


def test_has_views_sees_tensors_and_arrays_that_share_the_memory():
    tensor = torch.zeros(4)
    assert not compat.has_views(tensor)
    for make in (lambda: tensor[1:], lambda: tensor.numpy(), lambda: tensor.detach()):
        view = make()
        assert compat.has_views(tensor)
        del view
        assert not compat.has_views(tensor)


def test_in_place_version_counts_writes():
    tensor = torch.zeros(2)
    before = compat.in_place_version(tensor)
    tensor.add_(1)
    assert compat.in_place_version(tensor) == before + 1


def test_in_function_transform_is_true_within_transforms_only():
    seen = []
    torch.func.grad(lambda x: (seen.append(compat.in_function_transform()), x.sum())[1])(torch.ones(2))
    assert seen == [True] and not compat.in_function_transform()


def test_is_view():
    tensor = torch.zeros(2, 2)
    assert compat.is_view(tensor[0]) and not compat.is_view(tensor)


def test_is_view_op_tells_views_from_copies():
    assert compat.is_view_op(torch.ops.aten.t.default) and compat.is_view_op(torch.ops.aten.slice.Tensor)
    assert not compat.is_view_op(torch.ops.aten.clone.default) and not compat.is_view_op(torch.ops.aten.add_.Tensor)


def test_storage_id_on_the_meta_device():
    one, other = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    ids = [compat.storage_id(tensor.untyped_storage()) for tensor in (one, one[1:], other)]
    assert ids[0] == ids[1] != ids[2]


def test_inside_backward():
    seen = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda grad: seen.append(compat.inside_backward()))
    tensor.sum().backward()
    assert seen == [True] and not compat.inside_backward()


def test_foreach_arithmetic():
    lists = [torch.ones(2), torch.full((3,), 2.0)]
    compat.foreach_mul_(lists, 3.0)
    compat.foreach_add_(lists, [torch.ones(2), torch.ones(3)], alpha=2.0)
    assert [tensor[0].item() for tensor in lists] == [5.0, 8.0]
    assert [t[0].item() for t in compat.foreach_sub(lists, [torch.ones(2), torch.ones(3)])] == [4.0, 7.0]
    compat.foreach_lerp_(lists, [torch.ones(2), torch.zeros(3)], 0.5)
    assert [tensor[0].item() for tensor in lists] == [3.0, 4.0]
    compat.foreach_copy_(lists, [torch.ones(2), torch.ones(3)])
    assert [tensor[0].item() for tensor in lists] == [1.0, 1.0]
    compat.foreach_zero_(lists)
    assert not any(tensor.any() for tensor in lists)


def test_loss_scale_halves_and_doubles():
    scale, good, found = torch.tensor(8.0), torch.zeros((), dtype=torch.int32), torch.tensor(1.0)
    compat.amp_update_scale_(scale, good, found, 2.0, 0.5, 1)
    assert scale.item() == 4.0
    compat.amp_update_scale_(scale, good, found.zero_(), 2.0, 0.5, 1)
    assert scale.item() == 8.0


def test_chained_schedulers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    parts = [ConstantLR(optimizer), ConstantLR(optimizer)]
    assert compat.chained_schedulers(SequentialLR(optimizer, parts, [2])) == parts
    assert compat.chained_schedulers(parts[0]) == compat.chained_schedulers(None) == []


def test_schedule_that_steps_before_a_marked_optimizer_warns_not():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    schedule = ConstantLR(optimizer)
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before"):
        ConstantLR(optimizer).step()
    compat.mark_updated(optimizer)
    schedule.step()


# ── operators and modes ──────────────────────────────────────────────────────────────────────────


class Operators(compat.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_host_read_op_is_what_item_calls():
    with Operators() as operators:
        torch.ones(1).item()
    assert compat.host_read_op() in operators.seen


def test_cpu_attention_ops_are_what_attention_calls():
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Operators() as operators:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert set(compat.cpu_attention_ops()) <= set(operators.seen)


def test_schema_arguments_tell_what_is_written():
    written = [
        a.name for a in compat.schema_arguments(torch.ops.aten.add_.Tensor) if a.alias_info and a.alias_info.is_write
    ]
    assert written == ["self"]


def test_tree_flatten_and_map_only():
    tree = {"a": (1, "b"), "c": [2.0]}
    assert compat.tree_flatten(tree)[0] == [1, "b", 2.0]
    assert compat.tree_map_only(str, str.upper, tree) == {"a": (1, "B"), "c": [2.0]}


def test_without_modes_hides_operators_from_a_mode():
    with Operators() as operators, compat.without_modes():
        torch.ones(1) + 1
    assert not operators.seen


def test_without_torch_function_hides_overrides():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise AssertionError("called")

    loud = torch.ones(1).as_subclass(Loud)
    with compat.without_torch_function():
        assert float(torch.add(loud, 1)) == 2.0
    with pytest.raises(AssertionError, match="called"):
        torch.add(loud, 1)


def test_patch_trunc_normal_replaces_the_implementation_and_restores_it():
    def make(original):
        return lambda tensor, *args, **kwargs: tensor.fill_(7.0)

    with compat.patch_trunc_normal(make):
        assert nn.init.trunc_normal_(torch.zeros(1)).item() == 7.0
    assert abs(nn.init.trunc_normal_(torch.zeros(1)).item()) <= 2.0


def threads_of_this_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_end_intra_op_threads_leaves_only_this_thread_to_compute():
    values = torch.ones(1 << 18)
    torch.set_num_threads(2)
    try:
        compat.end_intra_op_threads()
        others = threads_of_this_process()  # of earlier tests: one of them may end at any time
        values.mul(2)
        second = threads_of_this_process() - others
        assert second and compat.end_intra_op_threads()
        assert not second & threads_of_this_process()
        assert values.mul(2).sum() == 2 * len(values)  # starts it again
        assert threads_of_this_process() - others and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# ── DataLoader ───────────────────────────────────────────────────────────────────────────────────


class Faulty(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("no such\nlabel")
        return index


def error_of(loader: DataLoader) -> Exception:
    with pytest.raises(KeyError) as caught:
        list(loader)
    return caught.value


def test_workers_started():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert not compat.workers_started(loader)
    list(loader)
    assert compat.workers_started(loader)


def test_iterator_that_a_loader_keeps_is_swapped():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert compat.swap_persistent_iterator(loader, None) is first
    second = iter(loader)
    assert second is not first and compat.swap_persistent_iterator(loader, first) is second
    assert iter(loader) is first and len(list(first)) == 2


def test_error_of_a_worker_is_recognized_and_quoted():
    error = error_of(DataLoader(Faulty(), batch_size=2, num_workers=1))
    assert compat.contains_worker_traceback(error)
    assert compat.worker_error_text(error) == repr(KeyError("no such\nlabel")).replace("KeyError(", "KeyError: ")[:-1]


# ── errors that have no type of their own ────────────────────────────────────────────────────────


def raised(function) -> Exception:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def test_is_out_of_memory():
    assert compat.is_out_of_memory(raised(lambda: torch.empty(1 << 60, dtype=torch.uint8)))
    assert compat.is_out_of_memory(MemoryError()) and compat.is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert not compat.is_out_of_memory(ValueError("out of memory")) and not compat.is_out_of_memory(
        RuntimeError("lost")
    )


def test_autograd_error_kind():
    weight = torch.ones(2, requires_grad=True)
    assert compat.autograd_error_kind(raised(lambda: torch.ones(1).sum().backward())) == "no_gradient"
    assert compat.autograd_error_kind(raised(lambda: (weight * 2).backward())) == "not_scalar"
    loss = nn.functional.cross_entropy
    assert (
        compat.autograd_error_kind(raised(lambda: loss(torch.ones(1, 2), torch.tensor([5])))) == "index_out_of_bounds"
    )
    assert compat.autograd_error_kind(raised(lambda: weight @ torch.ones(3))) is None
    advice = "enable it by passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel"
    assert compat.autograd_error_kind(RuntimeError(advice)) == "unused_parameters"
    assert compat.autograd_error_kind(KeyError(advice)) is None


def run_ranks(function, *args) -> list:
    """Returns what ``function(rank, *args)`` returns in each of two gloo ranks; None for a rank that dies."""
    system = multiprocessing.get_context("fork")
    queue = system.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=2, timeout=timedelta(seconds=3))
        queue.put((rank, function(rank, *args)))
        os._exit(0)

    processes = [system.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    answers = {}
    while not queue.empty():
        rank, answer = queue.get()
        answers[rank] = answer
    return [answers.get(rank) for rank in range(2)]


def failing_peer(rank: int, is_killed: bool):
    dist.barrier()
    if rank == 1:
        if is_killed:
            os._exit(1)
        time.sleep(6)
        return None
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        wrapped = ValueError("the step failed")
        wrapped.__cause__ = error
        return compat.peer_failure(error), compat.peer_failure(wrapped)
    return "no error"


@pytest.mark.parametrize(("is_killed", "kind"), [(True, "gone"), (False, "timeout")])
def test_peer_failure_of_gloo(is_killed, kind):
    assert run_ranks(failing_peer, is_killed)[0] == (kind, kind)


def test_peer_failure_of_other_errors():
    assert compat.peer_failure(dist.DistBackendError("NCCL: remote process exited")) == "gone"
    assert compat.peer_failure(RuntimeError("gloo, connection closed by peer in DataLoader worker 1")) is None
    assert compat.peer_failure(RuntimeError("closed by peer")) is compat.peer_failure(None) is None


def timeouts_of_new_groups(rank: int) -> list[float]:
    """Returns the timeout of a barrier in a group created inside the context and in one created outside."""
    with compat.default_process_group_timeout(1.0):
        inside = dist.new_group([0, 1])
    began = time.monotonic()
    if rank == 0:
        error = raised(lambda: dist.all_reduce(torch.ones(1), group=inside))
        assert compat.peer_failure(error) == "timeout"
    waited = time.monotonic() - began
    time.sleep(2.0)
    return waited


def test_default_process_group_timeout():
    waited = run_ranks(timeouts_of_new_groups)[0]
    assert waited is not None and 0.5 < waited < 2.5


def ddp_buckets(rank: int) -> list:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    first = compat.ddp_bucket_sizes(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    sizes = compat.ddp_bucket_sizes(model)
    hooked = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    hooked.register_comm_hook(None, allreduce_hook)
    hooked(torch.ones(1, 4)).sum().backward()
    return [first, sizes, compat.ddp_bucket_sizes(hooked)]


def test_ddp_bucket_sizes():
    for answer in run_ranks(ddp_buckets):
        assert answer is not None
        assert sum(answer[1]) == 4 * (16 + 4) and answer[2] is None


class Branching(nn.Module):
    """Has a branch that depends on values, which no version of the compiler can trace."""

    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


def test_is_compiled_and_why_no_graph_was():
    before = compat.graph_break_reasons()
    layer, branching = nn.Linear(2, 2), Branching()
    assert not compat.is_compiled(layer)
    compat.compile_in_place([layer, branching], compat.compiler_backend("eager", "default"))
    assert compat.is_compiled(layer)
    layer(torch.zeros(1, 2))
    assert compat.graph_break_reasons() == before
    branching(torch.zeros(2))
    assert "data-dependent branching" in str(compat.graph_break_reasons() - before)


@pytest.mark.slow
def test_graph_break_of_names_the_line():
    found = []

    def backend(graph, inputs):
        found.append(compat.graph_break_of(graph))
        return graph.forward

    @torch.compile(backend=backend)
    def breaks(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    breaks(torch.ones(2))
    reason, file, line = found[0]
    assert reason and file == __file__ and "graph_break()" in Path(file).read_text().splitlines()[line - 1]
    assert found[1] is None


@pytest.mark.slow
def test_cached_compile_seconds_are_those_that_the_cache_spares(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer, spared, spent = nn.Linear(2, 2), [], []
    for _ in range(2):
        torch.compiler.reset()
        before = compat.cached_compile_seconds(), compat.compile_seconds()
        compat.compile_in_place([layer], compat.compiler_backend("inductor", "default"))
        layer(torch.ones(1, 2)).sum().backward()
        spared.append(compat.cached_compile_seconds() - before[0])
        spent.append(compat.compile_seconds() - before[1])
    assert spared[0] == 0 and spent[1] < spared[1] + spent[1] < 1.5 * spent[0]


def test_module_call_can_be_set_and_is_dropped_by_copies():
    layer = nn.Linear(2, 2)
    call, calls = compat.get_module_call(layer), []
    compat.set_module_call(layer, lambda *inputs: calls.append(1) or call(*inputs))
    layer(torch.zeros(1, 2))
    assert calls == [1] and compat.is_compiled(layer)
    copy.deepcopy(layer)(torch.zeros(1, 2))
    assert calls == [1]
    compat.set_module_call(layer, None)
    layer(torch.zeros(1, 2))
    assert calls == [1]


def test_patch_module_call_reaches_every_module():
    calls = []
    original = compat.patch_module_call(lambda module, *inputs: calls.append(type(module)) or original(module, *inputs))
    try:
        nn.Sequential(nn.Linear(2, 2))(torch.zeros(1, 2))
    finally:
        assert compat.patch_module_call(original) is not original
    assert calls == [nn.Sequential, nn.Linear]


def test_iterators_of_loaders_can_be_watched_and_replaced():
    seen, originals = [], []

    def watch(original):
        originals.append(original)
        return lambda self: seen.append(type(self).__name__) or original(self)

    compat.patch_next_batch(watch)
    compat.patch_loader_iterator(watch)
    try:
        assert len(list(DataLoader([1.0, 2.0]))) == 2
    finally:
        compat.patch_next_batch(lambda _: originals[0])
        compat.patch_loader_iterator(lambda _: originals[1])
    assert seen[0] == "DataLoader" and seen.count("_SingleProcessDataLoaderIter") == 3
    assert len(list(DataLoader([1.0]))) == 1 and len(seen) == 4


def test_kernels_of_recurrent_layers_are_those_of_torch_nn():
    x, h, c = torch.randn(2, 5, 3), torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    lstm, gru = nn.LSTM(3, 4, batch_first=True), nn.GRU(3, 4, batch_first=True)
    out, (last_h, last_c) = lstm(x, (h, c))
    for a, b in zip((out, last_h, last_c), compat.lstm_kernel(x, (h, c), list(lstm.parameters())), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gru(x, h), compat.gru_kernel(x, h, list(gru.parameters())), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam_step_is_that_of_torch_optim(amsgrad):
    parameter = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=True, amsgrad=amsgrad)
    parameter.grad = torch.arange(5.0)
    optimizer.step()
    weight, momentum, velocity, largest = torch.ones(5), torch.zeros(5), torch.zeros(5), torch.zeros(5)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": amsgrad}
    maxima, step = [largest] if amsgrad else [], torch.tensor(1.0)
    compat.fused_adam_step([weight], [parameter.grad], [momentum], [velocity], maxima, [step], **options)
    assert torch.equal(weight, parameter) and torch.equal(momentum, optimizer.state[parameter]["exp_avg"])
