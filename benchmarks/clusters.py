"""What a guest costs: on Ray and on Spark, against the same on one machine.

Starts small clusters here, prints one line for each figure, and the goal beside it. Needs `evenstep[ray,spark]`.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

import models
from models import TASKS, Task
from results import Record, add_option, shown

SMALL = Task(
    "an MLP of 0.26 million parameters",
    lambda: models.mlp((256,) * 5),
    lambda n: models.vectors(n, 256, 256),
    models.classify,
    128,
    models.sgd,
    steps=200,
)
"""Its step takes about 5 ms, so that little but the way between nodes is measured."""
LARGE = replace(TASKS["transformer"], name="a transformer of 3.4 million parameters")
cloudpickle.register_pickle_by_value(models)  # the nodes do not have it


def training(steps: int, stamps: str | None = None, task: Task = SMALL) -> list[float]:
    """Train a model; returns when every step was over, as worker 0 saw it."""
    import evenstep

    times = []
    with evenstep.Run(shards=8, seed=0, quiet=True) as run:
        model = task.model()
        model, _ = run.prepare(model, task.optimizer(model.parameters()))
        for batch in run.batches(
            task.dataset(16 * task.batch_size), batch_size=task.batch_size, epochs=1 + steps // 16
        ):
            run.step(batch, lambda part: task.loss(model, part))
            times.append(time.time())
            if stamps and run.worker == 0:
                Path(stamps, f"{len(times)}").write_text(str(times[-1]))
            if len(times) == steps:
                break
    return times


Line = list[str]  # what, how much, of what, goal


def line(name: str, value: float, unit: str, goal: str) -> Line:
    """One line of the table."""
    return [name, f"{value:.2f}", unit, goal]


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def step_ms(times: list[float]) -> float:
    """The median time of a step, without the first ones."""
    return 1000 * statistics.median(b - a for a, b in itertools.pairwise(times[len(times) // 5 :]))


@contextmanager
def ray_cluster(nodes: int) -> Iterator[tuple[Any, list[Any]]]:
    """A Ray cluster of this many nodes with a CPU each."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    added = [cluster.add_node(**node) for _ in range(nodes - 1)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        yield cluster, added
    finally:
        ray.shutdown()
        cluster.shutdown()


def on_ray(steps: int) -> Iterator[Line]:
    """Time to the first step, step time over two nodes, recovery."""
    import threading

    import ray

    import evenstep.ray

    with ray_cluster(3) as (cluster, added):

        @ray.remote(num_cpus=1)
        class Empty:
            def there(self) -> bool:
                return True

        empty_s = min(timed(lambda: ray.get(Empty.remote().there.remote())) for _ in range(3))
        begin = time.time()
        first_s = evenstep.ray.run(training, 1, workers=2, quiet=True)[0] - begin
        yield line("Ray: to the first step, beyond an empty actor", first_s - empty_s, "s", "< 5")
        for task, name, count in ((SMALL, "SMALL", steps), (LARGE, "LARGE", max(10, steps // 8))):
            on_two = step_ms(evenstep.ray.run(training, count, None, task, workers=2, quiet=True))
            here = step_ms(on_this_machine(f"clusters.training({count}, task=clusters.{name})")[0])
            yield line(f"Ray: step of {task.name}, 2 nodes / evenstep run -n 2", on_two / here, "", "1.15")
        with tempfile.TemporaryDirectory() as folder:
            killed: list[float] = []

            def strike() -> None:
                while not Path(folder, "20").exists():
                    time.sleep(0.01)
                killed.append(time.time())
                cluster.remove_node(added[-1], allow_graceful=False)

            thread = threading.Thread(target=strike)
            thread.start()
            evenstep.ray.run(training, 400, folder, workers=3, quiet=True)
            thread.join()
            stamps = sorted(float(file.read_text()) for file in Path(folder).iterdir() if file.name.isdigit())
            gap = max(b - a for a, b in itertools.pairwise(stamps) if b > killed[0])
            yield line("Ray: a node killed, until the next step is committed", gap, "s", "< 3")


def on_this_machine(call: str) -> list[Any]:
    """What a call of something in here returns on each worker of `evenstep run -n 2`."""
    import json
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(
            f"import sys, json\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport clusters\n"
            f"found = {call}\n"
            f"from evenstep.core import env\n"
            f"json.dump(found, open(f'{folder}/{{env.read().worker}}', 'w'))\n"
        )
        subprocess.run([sys.executable, "-m", "evenstep", "run", "-n", "2", str(script)], check=True)
        return [json.loads(Path(folder, str(worker)).read_text()) for worker in range(2)]


def on_spark(rows: int) -> Iterator[Line]:
    """Time to the first step, and rows from a DataFrame into training."""
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    import evenstep
    import evenstep.spark
    from evenstep.spark.rows import write

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false")
    session = builder.config("spark.log.level", "OFF").config("spark.driver.host", "127.0.0.1").getOrCreate()
    try:
        context = session.sparkContext
        warm = context.parallelize(range(2), 2).mapPartitions(lambda _: [1])
        warm.collect()
        empty_s = min(timed(warm.collect) for _ in range(3))
        begin = time.time()
        first_s = evenstep.spark.run(training, 1, workers=2, quiet=True)[0] - begin
        yield line("Spark: to the first step, beyond an empty task", first_s - empty_s, "s", "< 5")
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            frame = session.range(rows).select(
                F.array(*[F.rand(n).cast("float") for n in range(8)]).alias("features"),
                (F.col("id") % 10).alias("label"),
            )
            yield line(
                "Spark: rows written", rows / timed(lambda: write(frame, ["features", "label"], folder)), "rows/s", "-"
            )
            files = sorted(Path(folder).iterdir())
            alone = min(timed(lambda: [len(pq.read_table(file)) for file in files]) for _ in range(3))

            ours = into_batches(folder)
            yield line("Rows into training / pyarrow reading the files alone", alone / ours, "", "0.7")
            both = on_this_machine(f"clusters.into_batches({folder!r})")
            yield line("Rows into training by 2 workers / pyarrow reading them alone", alone / max(both), "", "0.7")
            alike = min(timed(lambda: shuffled(files, rows)) for _ in range(3))
            yield line("Rows into training / pyarrow taking as many at random", alike / ours, "", "-")
            yield line("Rows into training", rows / ours, "rows/s", "-")
    finally:
        session.stop()


def into_batches(folder: str) -> float:
    """Seconds for all rows of some files in batches, in random order, of a run with one worker or several."""
    import evenstep

    def once() -> None:
        data = evenstep.data.parquet(folder, ["features", "label"])
        with evenstep.Run(shards=8, quiet=True) as run:
            for batch in run.batches(data, batch_size=8192):
                for shard in run.local_shards:
                    batch.part(shard)

    return min(timed(once) for _ in range(3))


def shuffled(files: list[Path], rows: int) -> None:
    """What training needs of the files, by pyarrow alone: their rows in random order, in parts of 1,024."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.concat_tables([pq.read_table(file) for file in files]).combine_chunks()
    order = np.random.default_rng(0).permutation(rows)
    for first in range(0, rows, 1024):
        part = table.take(order[first : first + 1024])
        part["features"].combine_chunks().flatten().to_numpy().reshape(-1, 8)
        part["label"].to_numpy()


ELEPHAS = """
import sys, time
import numpy as np
from elephas.spark_model import SparkModel
from elephas.utils.rdd_utils import to_simple_rdd
from pyspark import SparkContext
from tensorflow.keras.layers import Dense, Input
from tensorflow.keras.models import Sequential
from tensorflow.keras.optimizers import SGD

mode, rows, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
generator = np.random.default_rng(0)
x, y = generator.random((rows, 784), dtype=np.float32), np.eye(10)[generator.integers(0, 10, rows)]
model = Sequential([Input((784,)), Dense(128, "relu"), Dense(128, "relu"), Dense(10, "softmax")])
model.compile(SGD(0.1), "categorical_crossentropy", ["acc"])
pairs = to_simple_rdd(SparkContext("local[2]", "elephas"), x, y).repartition(2).cache()
pairs.count()
trained = SparkModel(model, mode=mode, frequency="epoch", num_workers=2)
begin = time.time()
trained.fit(pairs, epochs=epochs, batch_size=64, verbose=0, validation_split=0.0)
print(rows * epochs / (time.time() - begin))
"""
"""Elephas's own example, an MLP for digits, on random ones; for a Python that has Elephas and TensorFlow."""


def digits() -> Any:
    """The same model in PyTorch."""
    from torch import nn

    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def beside_elephas(python: str, rows: int, epochs: int) -> Iterator[Line]:
    """Samples a second of a whole `fit`, with two workers that each have a core, here and there."""
    import subprocess

    import numpy as np
    from pyspark.sql import SparkSession

    from evenstep.spark import SparkModel

    os.environ["PYSPARK_PYTHON"] = sys.executable
    generator = np.random.default_rng(0)
    x, y = generator.random((rows, 784), dtype=np.float32), generator.integers(0, 10, rows).tolist()
    for mode in ("synchronous", "asynchronous"):
        words = [python, "-c", ELEPHAS, mode, str(rows), str(epochs)]
        theirs_env = {**os.environ, "PYSPARK_PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(words, env=theirs_env, stdout=subprocess.PIPE, text=True, check=True)
        theirs = float(done.stdout.split()[-1])
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        session = builder.config("spark.log.level", "OFF").config("spark.driver.memory", "2g").getOrCreate()
        try:
            pairs = session.sparkContext.parallelize(list(zip(x, y, strict=True)), 2).cache()
            pairs.count()
            model = SparkModel(digits, optimizer_config={"lr": 0.1}, mode=mode, num_workers=2, batch_size=64)
            ours = rows * epochs / timed(lambda: model.fit(pairs, epochs))  # noqa: B023  # called at once
        finally:
            session.stop()
        yield line(f"Elephas's example, {mode}: Elephas", theirs, "samples/s", "-")
        yield line(f"Elephas's example, {mode}: evenstep", ours, "samples/s", "-")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["ray", "spark", "elephas"])
    parser.add_argument("--elephas", metavar="PYTHON", help="a Python with Elephas, to run its example beside ours")
    parser.add_argument("--samples", type=int, default=12_000, help="of Elephas's example")
    parser.add_argument("--epochs", type=int, default=5, help="of Elephas's example")
    add_option(parser)
    options = parser.parse_args()
    record = Record.begin()
    parts = [on_ray(options.steps)] if options.only in (None, "ray") else []
    parts += [on_spark(options.rows)] if options.only in (None, "spark") else []
    if options.elephas:
        parts.append(beside_elephas(options.elephas, options.samples, options.epochs))
    record.table(["what", "found", "unit", "goal"], shown(itertools.chain.from_iterable(parts)))
    record.save(options.json)


if __name__ == "__main__":
    main()
