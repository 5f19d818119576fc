"""The image of the state: what every site copies, when it counts, and that one that changed by itself is not used."""

import pytest
import torch
from fakes import FakeFixed, FakeRounds, Table

from evenstep.engine import image as module
from evenstep.engine.image import Image
from evenstep.exchange.group import Group
from evenstep.testing.faults import flip
from evenstep.transport.memory import FlatRegion
from evenstep.transport.segment import Segment

CPU = torch.device("cpu")


class Site:
    """One worker with the whole state in memory of its own, and its view of the image."""

    def __init__(self, group, every=1):
        self.region = FlatRegion(CPU, 1000)
        self.tensors = [
            self.region.tensor(torch.Size(shape), dtype, stride)
            for shape, dtype, stride in (
                ((5, 7), torch.float64, (1, 5)),
                ((3,), torch.int64, None),
                ((11, 2), torch.float32, None),
            )
        ]
        self.image = Image(group, CPU, every)
        self.image.cover(self.region)

    def fill(self, value):
        for n, tensor in enumerate(self.tensors):
            tensor.fill_(value + n)

    def holds(self, value):
        return all((tensor == value + n).all() for n, tensor in enumerate(self.tensors))


@pytest.fixture
def sites_of(groups_of, monkeypatch):
    """Makes so many sites around one segment, whose pieces are small."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 64)

    def make(num_workers, **options):
        return [Site(group, **options) for group in groups_of(num_workers)]

    return make


def operate(sites, operations):
    """An operation is committed: the state is another, and an image of it is begun if that is due."""
    for site in sites:
        site.fill(10 * operations)
        site.image.take(operations)


def agree(sites):
    """The next operation lets all sites know what each has copied."""
    of_all = [site.image.copied() for site in sites]
    for site in sites:
        site.image.agree(of_all)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 40])
def test_what_the_sites_copied_together_comes_back_whole(sites_of, num_workers):
    sites = sites_of(num_workers)
    operate(sites, 1)
    agree(sites)
    for site in sites:
        site.fill(-1)
        assert site.image.operations == 1
        assert site.image.wrong() == []
        site.image.load()
        assert site.holds(10)


def test_before_the_first_operation_there_is_nothing_to_put_back(sites_of):
    (site,) = sites_of(1)
    site.fill(3)
    assert (site.image.operations, site.image.wrong()) == (0, [])
    site.image.load()
    assert site.holds(3)


def test_the_image_before_stays_until_all_have_copied_the_next(sites_of):
    sites = sites_of(2)
    operate(sites, 1)
    agree(sites)
    sites[0].fill(20)
    sites[0].image.take(2)
    agree(sites)  # the other has not copied its share
    for site in sites:
        site.image.begin()  # and is lost
        assert site.image.operations == 1
        assert site.image.wrong() == []
        site.image.load()
        assert site.holds(10)
    operate(sites, 3)
    agree(sites)
    assert [site.image.operations for site in sites] == [3, 3]


def test_another_number_of_workers_finds_the_image_that_some_have_taken(sites_of):
    sites = sites_of(3)
    operate(sites, 1)
    agree(sites)
    segment = Segment(sites[0].image._group.segment.fd)
    newcomer = Site(Group(segment, FakeRounds(Table(), 0), FakeFixed(1)))
    newcomer.image.begin()
    assert (newcomer.image.operations, newcomer.image.wrong()) == (1, [])
    newcomer.image.load()
    assert newcomer.holds(10)


@pytest.mark.parametrize("every", [1, 3])
def test_an_image_is_taken_every_so_many_operations_and_never_before_the_last_is_whole(sites_of, every):
    (site,) = sites_of(1, every=every)
    taken = []
    for operations in range(1, 10):
        operate([site], operations)
        if operations % 2 == 0:  # whether it is whole is seen late
            agree([site])
        taken.append(site.image.operations)
    assert taken == {1: [0, 1, 1, 3, 3, 5, 5, 7, 7], 3: [0, 0, 0, 3, 3, 6, 6, 6, 6]}[every]


def test_all_sites_take_them_as_rarely_as_the_slowest_wants(sites_of):
    sites = sites_of(2)
    for site in sites:
        site.image.agree([(0, 2), (0, 5)])
    assert [site.image.copied() for site in sites] == [(0, 5), (0, 5)]


# ---- a memory that changes by itself ----


def rooms(site):
    _, which = site.image._image
    return [(place, place.rooms[which], place.seals[which]) for place in site.image._places]


def test_every_flipped_bit_of_an_image_or_its_seals_is_seen_where_it_is(sites_of):
    site, other = sites_of(2)
    operate([site, other], 1)
    agree([site, other])
    ((place, room, seals),) = rooms(site)
    assert len(seals) == -(-place.flat.numel() // 64)
    for bit in [0, 63, 511, 512, 8 * room.numel() - 1]:
        flip(room, bit)
        for each in (site, other):
            (found,) = each.image.wrong()
            part = each.image._places[0].flat
            assert found.data_ptr() - part.data_ptr() == bit // 512 * 64
        flip(room, bit)
    flip(seals, 64 * 2 + 17)
    (found,) = site.image.wrong()
    assert found.data_ptr() - place.flat.data_ptr() == 2 * 64
    flip(seals, 64 * 2 + 17)
    assert site.image.wrong() == []


def test_an_image_that_is_half_of_another_moment_is_not_right(sites_of):
    sites = sites_of(2)
    operate(sites, 1)
    agree(sites)
    site = sites[0]
    ((_, room, seals),) = rooms(site)
    kept = room[:64].clone(), seals[:1].clone()
    operate(sites, 2)
    agree(sites)
    operate(sites, 3)
    agree(sites)
    assert rooms(site)[0][1].data_ptr() == room.data_ptr(), "they are taken in turns"
    room[:64], seals[:1] = kept
    assert len(site.image.wrong()) == 1


def test_a_mark_of_another_moment_is_seen_although_no_piece_has_changed(sites_of):
    (site,) = sites_of(1)
    operate([site], 1)
    agree([site])
    site.image._group.board.image = (2, site.image._image[1])
    site.image.begin()
    assert len(site.image.wrong()) == len(rooms(site)[0][2])


def test_one_tensor_is_found_as_it_was_copied_last(sites_of):
    (site,) = sites_of(1)
    operate([site], 1)
    for tensor in site.tensors:
        right = tensor.clone()
        tensor.zero_()
        found = site.image.find(tensor, 1)
        assert torch.equal(found, right)
        assert found.stride() == tensor.stride()
        assert site.image.find(tensor, 2) is None, "of another moment"
    agree([site])
    assert torch.equal(site.image.find(site.tensors[1], 1), torch.full((3,), 11))
    flip(rooms(site)[0][1], 8 * 5 * 64)  # in the second tensor
    assert site.image.find(site.tensors[1], 1) is None
    assert site.image.find(site.tensors[2], 1) is not None
    assert site.image.find(torch.ones(3), 1) is None, "no part of the state"


# ---- on a GPU ----


class Event:
    def __init__(self, copy_s=0.0):
        self.copy_s, self.is_over = copy_s, False

    def query(self):
        return self.is_over

    def elapsed_time(self, other):
        return 1e3 * self.copy_s


def test_a_copy_that_is_under_way_does_not_count(sites_of):
    (site,) = sites_of(1)
    operate([site], 1)
    site.image._events = [Event(), Event()]
    assert site.image.copied() == (0, 1)
    site.image._events[1].is_over = True
    assert site.image.copied() == (1, 1)


@pytest.mark.parametrize(
    ("copy_s", "every"),
    [(0.001, 1), (0.1, 5), (0.2, 60)],
    ids=["behind the step", "as long as the step", "longer than the step"],
)
def test_a_large_state_is_copied_as_often_as_it_costs_little(sites_of, monkeypatch, copy_s, every):
    (site,) = sites_of(1, every="auto")
    site.image._events, site.image._begun_at = [Event(copy_s), Event()], 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.2)  # two steps of a tenth of a second
    site.image._choose(2)
    assert abs(site.image.copied()[1] - every) <= 1
