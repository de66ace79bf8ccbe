"""What level 2 does on a device that is not here: the device is faked, the rest is real."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import optimizer
from tests import level_2
from tests.internals import AS_IT_IS, POLICIES, Cuda, Policy, Refused, Times, require_one_device
from tests.level_2 import FakeCuda, chosen, fake_gpu, image, lowered, pickled, plan_of
from tests.single_pass import ForwardOfTwo, rows

pytestmark = pytest.mark.usefixtures("right_is_enough")
RACE = Times.race


@pytest.fixture
def gpu(right_is_enough, monkeypatch):
    """The CPU counts as a GPU: replays read and write the same memory."""
    return fake_gpu(monkeypatch)


def net():
    """Layers that become regions, and code around them that does not."""
    torch.manual_seed(0)
    forward = (
        "y = m.layer(x).relu_();"
        "return {'image': y.permute(0, 2, 3, 1).sin(), 'scores': m.head(y.mean((2, 3))) * z}"
    )
    return ForwardOfTwo(forward, layer=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 5)).eval()


def inputs(seed=0, batch=2):
    return image(batch, 3, 9, 9, seed=seed), image(5, seed=seed)


def assert_answers(fast, of, *seeds):
    for seed in seeds:
        given = inputs(seed)
        assert plan_of(fast, *given) is not None
        answer, expected = fast(*given), of(*inputs(seed))
        assert_close(answer, expected)
        assert_close(given, inputs(seed), rtol=0, atol=0)
        assert answer["image"].stride() == expected["image"].stride()


def test_a_call_is_one_replay_with_the_models_answer_which_its_caller_keeps(gpu, monkeypatch):
    level_2.offer(monkeypatch, "stub")  # an engine for CPUs
    fast = lowered(net(), *inputs())
    gc.collect()
    assert chosen(fast)[-1] == "CUDA graph"
    assert not any(name.startswith("Stub") for name in chosen(fast))
    assert_answers(fast, net(), 0, 1, 2)
    first = fast(*inputs(1))
    fast(*inputs(2))
    assert_close(first, net()(*inputs(1)))
    first["image"].zero_()
    assert_answers(fast, net(), 1)
    assert gpu.records == 1


@rows("graphs records", {"graphs": (True, 2 + 1), "declined": (False, 0)})
def test_what_will_be_part_of_a_graph_races_as_one(gpu, monkeypatch, graphs, records):
    """A region as it is, in channels_last, and the whole call."""
    monkeypatch.setattr(Times, "race", RACE)
    lowered(net(), *inputs(), cuda_graph=graphs)

    assert gpu.records == records


def test_it_can_be_declined(gpu):
    fast = lowered(net(), *inputs(), cuda_graph=False)
    pickled(fast).lower(inputs(batch=4))
    fast.refit(net().state_dict(), inputs())

    assert_answers(fast, net(), 0)
    assert gpu.records == 0


def test_other_calls_run_without_it(gpu, monkeypatch):
    fast, (x, scale) = lowered(net(), *inputs()), inputs()

    assert plan_of(fast, *inputs(batch=3)) is None
    assert fast(x.requires_grad_(), scale)["scores"].requires_grad

    # A graph of the caller's, into which the model is launched.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert plan_of(fast, *inputs()) is None
    assert_close(fast(*inputs()), net()(*inputs()))
    with pytest.raises(optimizer.InputError):
        fast.lower(inputs(batch=3))


def test_weights_that_were_written_and_a_pickle_are_recorded_again(gpu):
    fast = lowered(net(), *inputs())
    other = pickled(fast)
    fast.load_state_dict({name: each * 2 for name, each in fast.state_dict().items()})
    assert_answers(fast, fast.run_portable, 0, 1)
    assert gpu.records == 2
    with torch.inference_mode():
        other(*inputs())
    assert_answers(other, net(), 1, 0)
    assert gpu.records == 3


def test_threads_take_turns(gpu, monkeypatch):
    def slowly(self, *recording):
        time.sleep(0.002)
        replay(self, *recording)
        time.sleep(0.002)

    replay = FakeCuda.replay
    monkeypatch.setattr(FakeCuda, "replay", slowly)
    fast = lowered(net(), *inputs())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: fast(*inputs(seed)), range(8)))
    assert_close(answers, [net()(*inputs(seed)) for seed in range(8)])


def test_a_turn_waits_for_the_one_before_it_on_any_stream(monkeypatch):
    stream = MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", lambda: "done")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    turn = Cuda(0).turns()
    with pytest.raises(ZeroDivisionError), turn():
        stream.work(1 // 0)
    with turn():
        stream.work()
    waits, records = call.wait_event("done"), call.record_event("done")
    assert stream.mock_calls == [waits, records, waits, call.work(), records]


def cannot(self, program, given):
    raise RuntimeError("operation not permitted when stream is capturing")


def stale(self, program, given):
    return (lambda: None), list(given), program(*given)


@rows("record reason", {"no": (cannot, "not permitted"), "stale": (stale, "relative error")})
def test_what_cannot_be_recorded_is_launched(gpu, monkeypatch, record, reason):
    monkeypatch.setattr(FakeCuda, "record", record)
    monkeypatch.setattr(Times, "race", lambda *args: level_2.last_wins([*RACE(*args)]))
    fast = lowered(net(), *inputs())
    assert chosen(fast)[-1] == AS_IT_IS
    assert reason in fast.report.choices[-1].rejected["CUDA graph"]
    assert_answers(fast, net(), 0, 1)


def test_an_untimed_graph_is_compared_all_the_same(gpu, monkeypatch):
    def wrong(self, program, given):
        return (lambda: None), list(given), tuple(each * 1.5 for each in program(*given))

    fast = lowered(net(), *inputs(), tune_seconds=0)
    monkeypatch.setattr(FakeCuda, "record", wrong)
    assert chosen(fast)[-1] == "CUDA graph"
    with pytest.raises(optimizer.InputError, match="its answer differs"):
        fast.lower(inputs(batch=3), tune_seconds=0)


def test_a_call_is_decided_apart_from_the_region_that_it_consists_of(gpu):
    assert chosen(lowered(nn.Conv2d(3, 8, 3), image())) == ["channels_last", "CUDA graph"]


def test_on_mps_no_layout_and_no_kernel_is_tried(monkeypatch):
    level_2.pretend(monkeypatch, "mps")
    model, x = nn.Conv2d(3, 8, 3), image()
    fast = lowered(model, x)
    assert chosen(fast) == [AS_IT_IS]
    assert not fast.report.choices[0].rejected
    assert plan_of(fast, x) is not None  # fewer calls, which were measured to pay
    assert plan_of(lowered(model, x, tune_seconds=0), x) is None


def test_kernels_of_another_precision_or_gpu_are_another_plan(monkeypatch):
    level_2.pretend(monkeypatch, "cuda")
    model, x, cudnn = nn.Conv2d(3, 8, 3), image(), torch.backends.cudnn
    fast = lowered(model, x)
    monkeypatch.setattr(cudnn, "allow_tf32", not cudnn.allow_tf32)
    other = lowered(model, x)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    third = lowered(model, x)

    assert plan_of(fast, x) is not None
    assert len({each.report.choices[0].key for each in (fast, other, third)}) == 3


def test_on_an_unknown_device_or_several_nothing_is_lowered(monkeypatch):
    x, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    for tensors, reason in (([elsewhere], "nothing is known of its"), ([x, elsewhere], "several")):
        with pytest.raises(Refused, match=reason):
            require_one_device(tensors)
    monkeypatch.setitem(POLICIES, "meta", Policy())
    require_one_device([torch.tensor(1.0), elsewhere])  # a number goes with any device

    monkeypatch.delitem(POLICIES, "cpu")
    fast = lowered(net(), *inputs())
    assert plan_of(fast, *inputs()) is None
    assert any("not lowered" in remark for remark in fast.report.remarks)
