from evenstep.testing.chaos_machines import recoveries

SAID = """
evenstep: worker 1 (pid 22801 on a) was killed by SIGKILL at step 368; it is replaced
evenstep: step 369 is committed, 0.112 s after a worker was lost
evenstep: worker 4 (pid 22671 on b) was killed by SIGKILL at step 378; it is replaced in 0.1 s
evenstep: machine 6 (c) has said nothing for 2 s; worker 5 went with it
evenstep: step 378 is committed, 1.169 s after a worker was lost
evenstep: machine 7 (c) is lost: its connection closed; worker 5 went with it
evenstep: step 380 is committed, 0.250 s after a worker was lost
"""


def test_recovery_after_one_loss_is_told_from_that_after_several_in_a_row():
    assert recoveries(SAID) == ([0.112, 0.25], [1.169])
