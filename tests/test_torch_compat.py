"""The private PyTorch APIs behind ``hasten._torch_compat``: one test each."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.utils.data import DataLoader

from hasten import _torch_compat as compat
from hasten import _torch_compat_compile as compiler

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
    lone = raised(lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)))
    assert compat.autograd_error_kind(lone) == "one_value_per_channel"
    assert compat.autograd_error_kind(ValueError("index out of bounds")) is None
    advice = "enable it by passing the keyword argument `find_unused_parameters=True` to DistributedDataParallel"
    assert compat.autograd_error_kind(RuntimeError(advice)) == "unused_parameters"
    assert compat.autograd_error_kind(KeyError(advice)) is None


class Branching(nn.Module):
    """Has a branch that depends on values, which no version of the compiler can trace."""

    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


def test_is_compiled_and_why_no_graph_was():
    before = compiler.graph_break_reasons()
    layer, branching = nn.Linear(2, 2), Branching()
    assert not compiler.is_compiled(layer)
    compiler.compile_in_place([layer, branching], compiler.compiler_backend("eager", "default"))
    assert compiler.is_compiled(layer)
    layer(torch.zeros(1, 2))
    assert compiler.graph_break_reasons() == before
    branching(torch.zeros(2))
    assert "data-dependent branching" in str(compiler.graph_break_reasons() - before)


@pytest.mark.slow
def test_graph_break_of_names_the_line():
    found = []

    def backend(graph, inputs):
        found.append(compiler.graph_break_of(graph))
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
        before = compiler.cached_compile_seconds(), compiler.compile_seconds()
        compiler.compile_in_place([layer], compiler.compiler_backend("inductor", "default"))
        layer(torch.ones(1, 2)).sum().backward()
        spared.append(compiler.cached_compile_seconds() - before[0])
        spent.append(compiler.compile_seconds() - before[1])
    assert spared[0] == 0 and spent[1] < spared[1] + spent[1] < 1.5 * spent[0]


def test_module_call_can_be_set_and_is_dropped_by_copies():
    layer = nn.Linear(2, 2)
    call, calls = compat.get_module_call(layer), []
    compat.set_module_call(layer, lambda *inputs: calls.append(1) or call(*inputs))
    layer(torch.zeros(1, 2))
    assert calls == [1] and compiler.is_compiled(layer)
    copy.deepcopy(layer)(torch.zeros(1, 2))
    assert calls == [1]
    compat.set_module_call(layer, None)
    layer(torch.zeros(1, 2))
    assert calls == [1]


def test_calls_of_all_modules_can_be_intercepted():
    def call(module, *inputs):
        calls.append(type(module))
        compat.intercept_module_calls(None)
        try:
            return compat.get_module_call(module)(*inputs)
        finally:
            compat.intercept_module_calls(call)

    calls, own, compiled = [], nn.Module.__call__, nn.Linear(2, 2)
    compat.intercept_module_calls(call)
    try:
        compiled.compile(backend="eager")
        assert nn.Module.__call__ is own
        for module in (nn.Sequential(nn.Linear(2, 2)), compiled):
            module(torch.zeros(1, 2))
    finally:
        compat.intercept_module_calls(None)
    compiled(torch.zeros(1, 2))
    assert calls == [nn.Sequential, nn.Linear]
    assert compat.get_module_call(compiled) != compiled._call_impl, "what Module.compile() has set is still there"


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
