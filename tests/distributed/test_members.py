"""Who shares memory is found by trying."""

from dataclasses import replace

from ranks import run_rank_outcomes
from torch import distributed as dist

import processes
from evenstep.distributed import members
from evenstep.distributed.members import Member, RankMeeting


def test_a_card_counts_only_if_it_says_what_its_owner_says():
    with RankMeeting(dist.HashStore(), 0, [0], 5.0) as meeting:
        (me,) = meeting.members
        assert meeting.local == [0]
        assert members._shares_memory(me)
        assert not members._shares_memory(replace(me, secret="another one"))
        assert not members._shares_memory(replace(me, card=0))  # some other file
        assert not members._shares_memory(replace(me, pid=1 << 22))  # nobody
        assert not members._shares_memory(replace(me, pid=1))  # somebody else
    assert not members._shares_memory(me)  # gone with the meeting
    assert me.card not in processes.memfds()


def test_a_member_says_who_it_is():
    assert str(Member(2, 5, 77, "box", 3, "x")) == "rank 5 (pid 77 on box)"


def test_ranks_that_do_not_agree_on_who_shares_memory_are_refused():
    really = members._shares_memory

    def body(_):
        raise AssertionError("no group was to be made")

    def one_sided(member: Member) -> bool:
        return member.name != 1 and really(member)  # everyone can reach rank 0, nobody rank 1

    members._shares_memory = one_sided
    try:
        found = run_rank_outcomes(2, body)
    finally:
        members._shares_memory = really
    assert [outcome.kind for outcome in found] == ["ConfigError", "ConfigError"], found
