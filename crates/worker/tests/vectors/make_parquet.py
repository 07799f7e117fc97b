"""Writes table.parquet, which tests/input/parquet.rs reads: python make_parquet.py (needs pyarrow)."""

import datetime
import decimal
import pathlib

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

N = 6
UTC = datetime.timezone.utc


def at(day):
    return datetime.datetime(1970, 1, 1 + day, 12)


table = pa.table(
    {
        "int8": pa.array(range(N), pa.int8()),
        "uint32": pa.array([2**32 - 1] * N, pa.uint32()),
        "int64": pa.array([-i for i in range(N)], pa.int64()),
        "uint64": pa.array([2**63] * N, pa.uint64()),
        "half": pa.array([i / 2 for i in range(N)], pa.float16()),
        "float": pa.array([i / 4 for i in range(N)], pa.float32()),
        "double": pa.array([i / 8 for i in range(N)], pa.float64()),
        "bool": pa.array([i % 2 == 1 for i in range(N)]),
        "decimal": pa.array([decimal.Decimal(-i) / 100 for i in range(N)], pa.decimal128(20, 2)),
        "date": pa.array([datetime.date(1970, 1, 1 + i) for i in range(N)], pa.date32()),
        "millis": pa.array([at(i) for i in range(N)], pa.timestamp("ms")),
        "micros": pa.array([at(i) for i in range(N)], pa.timestamp("us", tz="UTC")),
        "nanos": pa.array([at(i) for i in range(N)], pa.timestamp("ns")),
        "iso": [f"1970-01-0{1 + i}" for i in range(N)],
        "city": ["Rome", "Paris", None, "Rome", "Oslo", "Rome"],
        "code": pa.array([7, 8, None, 7, 9, 7], pa.int64()),
        "list": [[1, 2]] * N,
        "label": ["no", "yes", "no", "yes", "no", "yes"],
    }
)
# Two row groups, and pages of each kind of encoding.
pq.write_table(
    table,
    pathlib.Path(__file__).with_name("table.parquet"),
    row_group_size=4,
    compression={"int8": "gzip", "int64": "none", "double": "lz4"} | {n: "snappy" for n in ("city", "label", "date")},
    use_dictionary=["city", "label", "code"],
    write_statistics=False,
)

# Exact numbers, a gap, lists, a label that is missing, and pandas' index.
count = 8
frame = pd.DataFrame(
    {
        "big": pd.array([2**63 + 100 * i for i in range(count)], dtype="uint64"),
        "exact": [decimal.Decimal(1234567890123456780 + i) for i in range(count)],
        "shop": [1.0, 2.0, None, 4.0, 1.0, 2.0, 3.0, 4.0],
        "lists": [[i, i + 1] if i % 2 else [] for i in range(count)],
        "label": pd.array([i % 2 for i in range(count - 1)] + [None], dtype="Int64"),
    }
).sample(frac=1, random_state=1).sort_values("big", kind="stable")
frame.index = list(reversed(range(count)))
frame.to_parquet(pathlib.Path(__file__).with_name("forms.parquet"), compression="zstd")
