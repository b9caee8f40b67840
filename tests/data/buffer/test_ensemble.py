"""Several buffers sampled as one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from episodes import episodes, slices_of
from face import refused

from rlcli.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.transforms import MultiStepTransform


def member(sampler=None, **options):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, **options)


def per_worker(workers=3, make=member, **options):
    rb = ReplayBufferEnsemble.per_worker(workers, make, **{"batch_size": 12, "seed": 0, **options})
    for worker in range(workers):
        rb.extend(episodes([10, 10], first=10 * worker), buffer=worker)
    return rb


def test_every_worker_writes_a_buffer_of_its_own_and_samples_hold_rows_of_all():
    rb = per_worker()
    assert len(rb) == 60 and [len(rb[i]) for i in range(3)] == [20] * 3
    sample = rb.sample()
    assert sample.shape == (3, 4)
    assert (sample["observation"][..., 0] // 10 == torch.arange(3)[:, None]).all()
    assert torch.equal(sample["index", "buffer_ids"], torch.arange(3)[:, None].expand(3, 4))
    for worker in range(3):
        rows = rb[worker][sample["index", "index"][worker]]
        assert torch.equal(rows["observation"], sample["observation"][worker])
    assert rb.add(episodes([1])[0], buffer=2) == 20
    rb.empty()
    assert len(rb) == 0


@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_iteration_gives_samples_until_an_epoch_of_a_member_ends(prefetch):
    rb = per_worker(make=lambda: member(SamplerWithoutReplacement()), prefetch=prefetch, layout="stack")
    rb.sample()
    for _ in range(2):
        samples = list(rb)
        assert [sample.shape for sample in samples] == [(3, 4)] * 5
        rows = [{*sample["index", "index"][i].tolist()} for sample in samples for i in range(3)]
        assert sum(map(len, rows)) == 60 and set.union(*rows) == {*range(20)}
    assert next(iter(per_worker())).shape == (3, 4)  # without end
    rb.close()


def test_slices_of_every_member_are_stacked_or_lie_end_to_end_where_they_may_be_short():
    rb = per_worker(make=lambda: member(SliceSampler(num_slices=2)))
    for part in rb.sample().exclude("index").unbind(0):
        slices_of(part, [2, 2])
    ragged = per_worker(
        make=lambda: member(SliceSampler(num_slices=2, slice_len=15, strict_length=False)), batch_size=90
    )
    sample = ragged.sample()
    assert ragged.layout == "cat" and sample.shape == (60,)
    slices_of(sample.exclude("index"), [10] * 6)


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("layout", ["stack", "cat"])
def test_what_is_known_of_a_sample_names_member_and_row(layout, prefetch):
    with per_worker(layout=layout, prefetch=prefetch) as rb:
        sample, info = rb.sample(return_info=True)
        assert (
            info["index"].shape == info["buffer_ids"].shape == sample.shape == ((3, 4) if layout == "stack" else (12,))
        )
        assert torch.equal(info["index"], sample["index", "index"])
        assert torch.equal(info["buffer_ids"], sample["index", "buffer_ids"])
    plain = ReplayBufferEnsemble(*(ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)), batch_size=6)
    for member in range(2):
        plain.extend(episodes([9], first=member), buffer=member)
    sample, info = plain.sample(return_info=True)
    assert torch.equal(sample["observation"], torch.stack((info["buffer_ids"], info["index"]), -1).float())


def test_a_part_of_an_ensemble_is_one_too():
    rb = per_worker()
    some = rb[1:]
    assert some.buffers == rb.buffers[1:] and some.sample()["observation"].shape == (2, 6, 2)
    drawn = ReplayBufferEnsemble(*rb.buffers, p=[0.2, 0.0, 0.8], batch_size=6)[:2]
    assert set(drawn.sample()["index", "buffer_ids"].flatten().tolist()) == {0}
    refused(ArgumentError, "buffers", lambda: rb[3:])
    chances = torch.rand(9, generator=torch.Generator().manual_seed(1)).double().numpy()
    chances[-1] = 0  # whose chance is nothing, however the others are added up
    nine = ReplayBufferEnsemble(*(member() for _ in range(9)), p=chances, batch_size=6)
    assert nine[:]._chances.tolist() == chances.tolist()


def test_members_are_drawn_by_their_chance():
    rb = ReplayBufferEnsemble(*per_worker().buffers, p=[0.2, 0.0, 0.8], num_buffer_sampled=2, batch_size=8, seed=1)
    ids = torch.cat([rb.sample()["index", "buffer_ids"][:, 0] for _ in range(500)])
    shares = torch.bincount(ids, minlength=3) / len(ids)
    assert rb.sample().shape == (2, 4) and shares[1] == 0 and abs(shares[0] - 0.2) < 0.05


def test_priorities_go_back_to_the_member_they_are_of():
    rb = per_worker(make=lambda: member(PrioritizedSampler(100, 1.0, 1.0)), batch_size=600)
    sample = rb.sample()
    rows, ids = sample["index", "index"], sample["index", "buffer_ids"]
    sample["td_error"] = torch.where(rows == ids + 5, 1e9, 0.0).unsqueeze(-1)
    rb.update_tensordict_priority(sample)
    again = rb.sample()["index"]
    assert torch.equal(again["index"], again["buffer_ids"] + 5)


def test_transforms_of_whole_samples_threads_and_seeds():
    def draws(**options):
        rb = per_worker(transform=lambda td: td.reshape(-1), **options)
        rb.set_seed(5)
        return [rb.sample()["action"].tolist() for _ in range(5)]

    plain = draws()
    assert plain == draws(prefetch=2) and len(plain[0]) == 12


@pytest.mark.parametrize("disturb", ["another size", "a state", "a transform"])
@pytest.mark.parametrize("prefetch", [None, 3])
def test_what_was_made_ahead_and_not_handed_out_is_drawn_again(prefetch, disturb):
    def make():
        return member(SamplerWithoutReplacement(shuffle=False))

    with per_worker(make=make, prefetch=prefetch, layout="stack") as rb:
        drawn, sizes = [rb.sample()["index", "index"]], [12, 12, 12, 12]
        if disturb == "another size":
            sizes = [6, 18, 24]
        elif disturb == "a state":
            rb.state_dict()
        else:
            rb.append_transform(lambda td: td)
        drawn += [rb.sample(size)["index", "index"] for size in sizes]
        assert torch.equal(torch.cat(drawn, 1), torch.arange(20).expand(3, 20))


@pytest.mark.parametrize("theirs", [None, 2])
@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_state_leaves_no_sample_out_whoever_makes_samples_ahead(prefetch, theirs):
    def made():
        storage, sampler = LazyTensorStorage(100), RandomSampler(seed=5)
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, prefetch=theirs)

    rb, other = (per_worker(make=made, prefetch=prefetch, layout="stack") for _ in range(2))
    plain = per_worker(make=lambda: member(RandomSampler(seed=5)), layout="stack")
    for _ in range(2):
        assert (rb.sample() == plain.sample()).all()
    other.sample()
    other.load_state_dict(rb.state_dict())
    for _ in range(7):
        sample = plain.sample()
        assert (rb.sample() == sample).all() and (other.sample() == sample).all()
    for each in (rb, other, plain):
        each.close()


@pytest.mark.parametrize("way", ["their own threads", "a state of each", "a state of each, loaded with a thread"])
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("chance", [False, True])
@pytest.mark.parametrize("disturb", ["nothing", "a state", "a transform", "a sample that fails"])
@pytest.mark.every(3)
def test_samples_that_members_hold_ready_come_first(prefetch, chance, way, disturb):
    """Whoever made them, however often what the ensemble made of them is thrown away."""

    def made(theirs):
        storage, sampler = LazyTensorStorage(100), RandomSampler(seed=5)
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, prefetch=theirs)
        rb.extend(episodes([10, 10]))
        return rb

    def joined(members, prefetch=None, transform=None):
        options = {} if chance else {"sample_from_all": True}
        return ReplayBufferEnsemble(
            *members, batch_size=12, seed=7, prefetch=prefetch, layout="stack", transform=transform, **options
        )

    fail = []
    holding, plain = [made(2) for _ in range(3)], [made(None) for _ in range(3)]
    for one, other in zip(holding, plain, strict=True):
        assert (one.sample(4) == other.sample(4)).all()  # and makes two more
    if way != "their own threads":
        loaded = [made(2 if "thread" in way else None) for _ in range(3)]
        for one, other in zip(loaded, holding, strict=True):
            one.load_state_dict(other.state_dict())
            other.close()
        holding = loaded
    with joined(holding, prefetch, lambda td: td if not fail else 1 / fail.pop()) as rb, joined(plain) as wanted:
        for turn in range(8):
            if turn == 1 and disturb == "a state":
                rb.state_dict()
            elif turn == 1 and disturb == "a transform":
                rb.append_transform(lambda td: td)
            elif turn == 0 and disturb == "a sample that fails":
                fail.append(0)
                with pytest.raises(ZeroDivisionError):
                    rb.sample()
            found, expected = rb.sample(), wanted.sample()
            assert (found["index"] == expected["index"]).all() and (found == expected).all(), turn


@pytest.mark.parametrize("prefetch", [None, 3])
def test_members_drawn_by_chance_are_those_of_the_seed_whatever_was_thrown_away(prefetch):
    with per_worker(prefetch=prefetch, sample_from_all=False, num_buffer_sampled=2) as rb:
        rb.set_seed(5)
        found = [rb.sample(4)["index"]]
        rb.state_dict()
        found += [rb.sample(6)["index"] for _ in range(4)]
    with per_worker(sample_from_all=False, num_buffer_sampled=2) as rb:
        rb.set_seed(5)
        wanted = [rb.sample(size)["index"] for size in (4, 6, 6, 6, 6)]
    assert all((a == b).all() for a, b in zip(found, wanted, strict=True))


def test_a_state_goes_on_bit_for_bit():
    rb, other = per_worker(), per_worker()
    rb.sample()
    other.load_state_dict(rb.state_dict())
    assert all((rb.sample() == other.sample()).all() for _ in range(5))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: ReplayBufferEnsemble(), "made of buffers"),
        (lambda: ReplayBufferEnsemble(member(), sample_from_all=True, p=[1.0]), "nothing to choose"),
        (lambda: ReplayBufferEnsemble(member(), p=[0.0]), "a chance for every buffer"),
        (lambda: ReplayBufferEnsemble(member(), p=[0.5, 0.5]), "for 1"),
        (lambda: ReplayBufferEnsemble(member(), layout="flat"), "one of None, stack, cat"),
        (lambda: per_worker().extend(episodes([2])), "buffer=worker"),
        (lambda: per_worker()[3], "there are 3"),
        (lambda: per_worker().sample(10), "Use batch_size=12"),
        (lambda: per_worker(batch_size=None).sample(), "no batch size"),
        (lambda: ReplayBufferEnsemble(member(), batch_size=2).sample(), "buffer 0 of the ensemble is empty"),
        (lambda: per_worker().load_state_dict({}), "this is no state of an ensemble: it holds nothing"),
        (lambda: per_worker().update_tensordict_priority(per_worker().sample()), "td_error"),
    ],
)
def test_what_is_refused_is_said(act, text):
    with pytest.raises((ArgumentError, MissingKeyError)) as caught:
        act()
    assert text in str(caught.value)


def test_a_state_that_one_member_refuses_changes_none():
    def made(last, transform=None):
        rb = ReplayBufferEnsemble(
            member(RandomSampler(seed=1)), member(last), batch_size=8, seed=0, transform=transform
        )
        for worker in range(2):
            rb.extend(episodes([10], first=worker), buffer=worker)
        return rb

    ours, twin = made(RandomSampler(seed=2)), made(RandomSampler(seed=2))
    by_priority, other = made(PrioritizedSampler(100, 1.0, 1.0)), made(RandomSampler(), transform=lambda td: td)
    refused(ArgumentError, "index next", lambda: by_priority.sample())
    for saved in (by_priority, other):
        saved.extend(episodes([5]), buffer=0)
        with pytest.raises(ArgumentError, match=r"another sampler|other transforms"):
            ours.load_state_dict(saved.state_dict())
        assert len(ours) == 20 and (ours[0][:] == twin[0][:]).all()
    assert all((ours.sample() == twin.sample()).all() for _ in range(3))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("sample_from_all", [True, False])
def test_a_sample_that_one_member_fails_to_give_uses_no_draw_up(prefetch, sample_from_all):
    def made(fail):
        first = member(SamplerWithoutReplacement(seed=1), prefetch=prefetch)
        last = member(SamplerWithoutReplacement(seed=2), transform=lambda td: td if not fail else 1 / fail.pop())
        rb = ReplayBufferEnsemble(first, last, batch_size=4, seed=0, sample_from_all=sample_from_all)
        for worker in range(2):
            rb.extend(episodes([20]), buffer=worker)
        return rb

    failing, twin = made([0, 0]), made([])
    for left in (2, 1, 0, 0, 0, 0):
        wanted = twin.sample()["index"]
        for _ in range(left and 2):
            with contextlib.suppress(ZeroDivisionError):
                found = failing.sample()["index"]
                break
        else:
            found = failing.sample()["index"]
        assert (found == wanted).all()
    failing.close()
    twin.close()


def test_plain_buffers_make_an_ensemble_without_index():
    rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(9)), batch_size=2)
    rb.extend(episodes([5]), buffer=0)
    assert "index" not in rb.sample()
    refused(MissingKeyError, "TensorDictReplayBuffers", lambda: rb.update_tensordict_priority(rb.sample()))


CHANGES = {
    "seed": lambda m: m.set_seed(123),
    "sampler": lambda m: m.set_sampler(SamplerWithoutReplacement(seed=5)),
    "epoch": lambda m: next(iter(m)),
    "rows": lambda m: (m.empty(), m.extend(episodes([6]))),
    "state": lambda m: m.load_state_dict(state_with_samples()),
}


def state_with_samples():
    rb = member(SamplerWithoutReplacement(seed=7), prefetch=2)
    rb.extend(episodes([10, 10]))
    rb.sample(4)
    return rb.state_dict()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_done_to_a_member_since_outlasts_samples_that_are_thrown_away(change):
    drawn = []
    for thrown in (False, True):
        rb = per_worker(2, lambda: member(SamplerWithoutReplacement(seed=1), batch_size=4), batch_size=8, prefetch=2)
        rb.sample()
        rb._ahead._threads.submit(int).result()  # all that is made ahead is made
        change(rb[0])
        if thrown:
            rb.append_transform(lambda sample: sample)
        drawn.append([rb[0].sample()["index"].tolist() for _ in range(4)])
    assert drawn[0] == drawn[1]


def test_the_layout_follows_the_samplers_of_members_unless_it_was_given():
    for layout, shape in ((None, (12,)), ("cat", (12,)), ("stack", (3, 4))):
        rb = per_worker(layout=layout)
        rb[0].set_sampler(SamplerWithoutReplacement(seed=0))
        assert rb.sample().shape == shape
    rb.batch_size = 39
    rb.sample()
    refused(ArgumentError, '13 layout="cat"', lambda: rb.sample())


def test_n_steps_are_not_counted_over_rows_in_no_order():
    for sampler, fits in ((lambda: RandomSampler(), False), (lambda: SliceSampler(slice_len=4), True)):
        rb = ReplayBufferEnsemble(
            member(sampler()), member(sampler()), batch_size=16, sample_from_all=True,
            transform=MultiStepTransform(3, 0.9),
        )  # fmt: skip
        for worker in range(2):
            rb.extend(episodes([10], first=worker), buffer=worker)
        if fits:
            assert rb.sample()["steps_to_next_obs"].max() == 3
        else:
            with refused(ArgumentError, "order time"):
                rb.sample()
