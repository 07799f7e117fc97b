"""Writes the corpus of the fuzz target `tables`: python3 fuzz/make_tables.py fuzz/corpus/tables. Needs numpy, pyarrow and pillow."""
import gzip, io, random, struct, sys
import numpy, pyarrow, pyarrow.parquet as parquet
from PIL import Image
from pathlib import Path
out = Path(sys.argv[1]); out.mkdir(exist_ok=True)
r = random.Random(1)
rows = [["a", "b", "c", "d", "y"]]
for i in range(8):
    rows.append([r.choice(["", "1.5", "-2", "1e3"]), r.choice(["x", "12345678901234567890", '"q ""w"""', "é"]), r.choice(["1|2", "3", ""]), r.choice(["2024-02-29", "2020-01-01T10:00:00Z"]), str(i % 2)])
csv = "\n".join(",".join(row) for row in rows).encode() + b"\n"
plain = "\r\n".join(";".join([r.choice(["1", "NA", "2.5"]), r.choice(["3", "4"]), r.choice(["0", "1"])]) for _ in range(8)).encode()
def table(codec, **more):
    t = pyarrow.table({
        "a": pyarrow.array([1.5, None, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        "b": pyarrow.array(["x", "y", None, "x", "y", "z", "x", "x"]).dictionary_encode() if codec != "none" else pyarrow.array([1, None, 3, 4, 5, 6, 2**63, 1], pyarrow.uint64()),
        "c": pyarrow.array([[1, 2], [3], [], None, [4], [5, 5], [6], [7]], pyarrow.list_(pyarrow.int64())),
        "d": pyarrow.array([0, 1, 2, 3, 4, 5, 6, 7], pyarrow.date32()),
        "y": pyarrow.array([0, 1] * 4),
    })
    sink = io.BytesIO(); parquet.write_table(t, sink, compression=codec, **more); return sink.getvalue()
def npy(array):
    sink = io.BytesIO(); numpy.save(sink, array); return sink.getvalue()
def picture(form, mode):
    sink = io.BytesIO(); Image.new(mode, (8, 8), 77).save(sink, form); return sink.getvalue()
criteo = b"".join(b"\t".join([str(i % 2).encode(), *[r.choice([b"", b"3", b"-1"]) for _ in range(13)], *[r.choice([b"", b"68fd1e64", b"80e26c9b"]) for _ in range(26)]]) + b"\n" for i in range(8))
svm = b"".join(f"{i % 2} 1:{i} 3:0.5 # c\n".encode() for i in range(8))
inputs = {
    "csv": (0, csv), "csv-quotes": (0, b"a,b,c,d,y\n1,\"x\ny\",1,2020-01-01,0\n2,\"a,b\",2,2020-01-01,1\n"),
    "gzip": (1, gzip.compress(csv, mtime=0)), "gzip-two": (1, gzip.compress(csv[:50], mtime=0) + gzip.compress(csv[50:], mtime=0)),
    "zstd": (2, pyarrow.compress(csv, "zstd", asbytes=True)), "no-header": (3, plain),
    **{f"parquet-{codec}": (4, table(codec)) for codec in ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]},
    "parquet-pages": (4, table("none", data_page_version="2.0", use_dictionary=False, row_group_size=3)),
    "libsvm": (5, svm), "libsvm-sparse": (6, gzip.compress(svm, mtime=0)), "criteo": (7, criteo),
    "npy-bytes": (8, npy(numpy.arange(64, dtype="u1").reshape(4, 4, 4))), "npy-floats": (8, npy(numpy.arange(12, dtype=">f4").reshape(4, 3))),
    "png": (9, picture("PNG", "L")), "jpeg": (9, picture("JPEG", "RGB")),
    "idx": (10, struct.pack(">IIII", 2051, 4, 3, 3) + bytes(range(36))),
}
for name, (form, content) in inputs.items():
    (out / name).write_bytes(bytes([form]) + content)
