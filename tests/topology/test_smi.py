import pytest

from evenstep.core.errors import ConfigError
from evenstep.plan.planner import lay
from evenstep.plan.topology import Topology
from evenstep.topology import from_smi

EIGHT = """
        \x1b[4mGPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    CPU Affinity    NUMA Affinity\x1b[0m
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     0-19,40-59      0
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     0-19,40-59      0
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     0-19,40-59      0
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     0-19,40-59      0
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     20-39,60-79     1
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     20-39,60-79     1
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     20-39,60-79     1
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      20-39,60-79     1

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""

OLD = """
\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity
GPU0\t X \tPIX\tPHB\tSOC\tSOC\t0-9
GPU1\tPIX\t X \tPXB\tSOC\tSOC\t0-9
GPU2\tPHB\tPXB\t X \tSOC\tSOC\t0-9
GPU3\tSOC\tSOC\tSOC\t X \tPIX\t10-19
mlx5_0\tSOC\tSOC\tSOC\tPIX\t X \t
"""


def kinds(topology: Topology, device: int) -> str:
    return " ".join(str(topology.link(device, b).kind) for b in range(topology.num_devices) if b != device)


def test_a_cube_of_nvlinks_is_read_with_its_widths_and_numa_nodes():
    topology = from_smi(EIGHT, "dgx1")
    assert topology.names == tuple(f"gpu{i}" for i in range(8))
    assert [topology.device(i).numa for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert kinds(topology, 0) == "nvlink nvlink nvlink nvlink socket socket socket"
    assert [topology.link(0, b).bandwidth_bytes_per_s for b in (1, 3)] == [25e9, 50e9]


def test_the_tree_over_the_cube_never_leaves_nvlink():
    topology = from_smi(EIGHT)
    layout = lay(topology, 8)
    assert {str(topology.link(m.source, m.target).kind) for moves in layout.rounds() for m in moves} == {"nvlink"}


def test_old_codes_network_cards_and_missing_numa_nodes():
    topology = from_smi(OLD)
    assert topology.num_devices == 4
    assert [kinds(topology, i) for i in (0, 1)] == ["switch bridge socket", "switch switch socket"]
    assert [topology.device(i).numa for i in range(4)] == [0, 0, 0, 1]


def machine(num_gpus: int, code: str, header: str, *rests: str) -> str:
    """The matrix of a machine whose GPUs are all connected in the same way, and what follows it in each line."""
    lines = ["\t" + "\t".join([*(f"GPU{i}" for i in range(num_gpus)), "NIC0", header])]
    for i in range(num_gpus):
        codes = [" X " if i == j else code for j in range(num_gpus)]
        lines.append("\t".join([f"GPU{i}", *codes, "NODE", rests[i * len(rests) // num_gpus]]))
    return "\n".join([*lines, "NIC0\t" + "NODE\t" * num_gpus + " X \t\t\t"])


THREE = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        (machine(8, "NV18", THREE, "0-55,112-167\t0\t\tN/A", "56-111\t1\t\tN/A"), [0, 0, 0, 0, 1, 1, 1, 1]),
        (machine(4, "NV18", THREE, "\t0\t\tN/A", "56\t1\t\tN/A", "\t1\t\tN/A"), [0, 0, 1, 1]),
        (machine(2, "NV6", THREE, "\t0\t\t4", "\t1\t\t12"), [0, 1]),
        (machine(2, "NV6", THREE, "0-71\t0\t\t4", "72-143\t1\t\t12"), [0, 1]),
        (machine(4, "NV6", "CPU Affinity", "0-23,48-71", "24-47,72-95"), [0, 0, 1, 1]),
        (machine(2, "PHB", THREE, "0-31\tN/A\t\tN/A"), [0, 0]),
        (machine(4, "NV6", THREE, ""), [0, 0, 0, 0]),
        (machine(1, "", THREE, "32-63\t1\t\tN/A"), [1]),
    ],
    ids=[
        "H100",
        "few cores allowed",
        "GH200, no cores allowed",
        "GH200",
        "DGX-2",
        "virtual",
        "nothing said",
        "one GPU",
    ],
)
def test_numa_nodes_are_found_in_the_columns_of_real_machines(text, nodes):
    topology = from_smi(text)
    assert [topology.device(i).numa for i in range(topology.num_devices)] == nodes


def test_of_several_matrices_the_first_counts():
    access = " \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n"  # what `nvidia-smi topo -p2p r` adds in a report
    assert from_smi(f"{OLD}\nLegend:\n\n{access}") == from_smi(OLD)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "Failed to initialize NVML",
            "no line of the text names GPU0, GPU1, ...; expected the output of `nvidia-smi topo -m`",
        ),
        ("GPU0 GPU1\nGPU0 X", "the line of GPU0 has fewer than 2 entries; expected a whole matrix"),
        (
            "GPU0 GPU1\nGPU0 X FOO\nGPU1 FOO X",
            "'FOO' between GPU0 and GPU1; expected NV#, PSB, PIX, PXB, PHB, NODE, SYS, SOC",
        ),
    ],
)
def test_what_is_no_matrix_is_refused(text, sentence):
    with pytest.raises(ConfigError) as caught:
        from_smi(text)
    assert str(caught.value) == sentence
