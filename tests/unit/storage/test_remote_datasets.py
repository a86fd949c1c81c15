"""Datasets on an S3 server: the same plan as from a local folder, and every problem in one line before training."""

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_listings import encode_image, make_config, prepare_subsets, strip_folder, write_files
from problem_lines import format_lines
from remote_servers import BUCKET, S3Server, run_file_server, run_s3_server

from library.config.schema import TrainConfig
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.validate import validate_dataset_config
from library.errors import ConfigError, FileError

pytestmark = pytest.mark.slow  # importing moto takes a second
NAMES = ["a b", "c#d", "e%20f", "g?h", "ü", "i[1]", "j+k", "l&m=n", "sub/o p", "sub/deep/猫"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch:
        environment: dict[str, str] = {}
        with run_s3_server(environment) as s3:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield s3


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg"


def write_pictures(folder: Path) -> Path:
    write_files(folder, {f"{name}.png": encode_image(number) for number, name in enumerate(NAMES)})
    write_files(folder, {f"{name}.txt": f"caption of {name}" for name in NAMES})
    write_files(folder, {".hidden.png": b"x", "sub/.hidden/x.png": b"x"})
    return folder


def assert_same_training(local: PreparedData, remote: PreparedData) -> None:
    assert remote.manifest.compute_fingerprint() == local.manifest.compute_fingerprint()
    assert remote.manifest.compute_sample_digests() == local.manifest.compute_sample_digests()
    for one, other in zip(local.manifest.samples, remote.manifest.samples, strict=True):
        assert (one.caption, one.content_hash, one.size) == (other.caption, other.content_hash, other.size)
        assert one.image.read_bytes() == other.image.read_bytes()
    assert remote.assignments == local.assignments
    plans = [prepared.build_batch_plan(2, TrainConfig()) for prepared in (local, remote)]
    steps = [[plan.get_micro_batch(position) for position in range(20)] for plan in plans]
    assert steps[0] == steps[1]


def test_a_folder_on_s3_is_trained_as_a_local_copy(server, tmp_path):
    folder = write_pictures(tmp_path / "local")
    url = server.upload_folder(folder, "my set/1 #x")
    keys = "recursive = true\nexclude = 'sub/deep'\nvalidation_split = 0.2"
    local = prepare_subsets(tmp_path, f"image_dir = '{folder}'\n{keys}")
    remote = prepare_subsets(tmp_path, f"image_dir = '{url}'\n{keys}")
    assert_same_training(local, remote)
    assert [
        note.replace(url, str(folder)) for note in remote.manifest.notes if "of remote files are kept in" not in note
    ] == [*local.manifest.notes]
    server.proxy.requests.clear()
    prepare_subsets(tmp_path, f"image_dir = '{url}'\n{keys}")
    assert server.proxy.count("list-type=2") == 2 and server.proxy.count("bytes=") == 0  # everything else is cached


def test_tars_and_parquet_files_are_read_by_ranges(server, tmp_path):
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "shards"
    folder.mkdir()
    noise = [encode_image(number) + os.urandom(400_000) for number in range(12)]
    for shard in range(2):
        with tarfile.open(folder / f"{shard:03d} #.tar", "w") as tar:
            for number in range(6 * shard, 6 * shard + 6):
                for name, data in ((f"{number}.png", noise[number]), (f"{number}.txt", f"caption {number}".encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    table = pyarrow.table({"image": noise, "text": [f"caption {number}" for number in range(12)]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)
    url = server.upload_folder(folder, "shards")
    for source in ("webdataset = '{}/{{000..001}} #.tar'", "webdataset = '{}/*.tar'", "parquet = '{}'"):
        local = prepare_subsets(tmp_path, source.format(folder))
        server.proxy.requests.clear()
        remote = prepare_subsets(tmp_path, source.format(url))
        assert_same_training(local, remote)
        sizes = sum(path.stat().st_size for path in folder.glob("*.tar" if "tar" in source else "*.parquet"))
        read = sum(map(count_requested_bytes, server.proxy.requests))
        assert read <= 1.05 * sizes, (source, server.proxy.requests)
        server.proxy.requests.clear()
        prepare_subsets(tmp_path, source.format(url))
        assert server.proxy.count("bytes=") == 0
    # Without the blocks, the index of a tar and its captions are still there, and one image is one request.
    source = f"webdataset = '{url}/000 #.tar'"
    prepared = prepare_subsets(tmp_path, source, remote_cache_dir=str(tmp_path / "other"))
    for path in (tmp_path / "other" / "blocks").rglob("*"):
        path.unlink() if path.is_file() else None
    server.proxy.requests.clear()
    again = prepare_subsets(tmp_path, source, remote_cache_dir=str(tmp_path / "other"))
    assert server.proxy.count("bytes=") == 0
    assert again.manifest.samples[3].image.read_bytes() == prepared.manifest.samples[3].image.read_bytes()
    (request,) = [request for request in server.proxy.requests if "bytes=" in request]
    assert count_requested_bytes(request) <= 2 * 2**20


def count_requested_bytes(request: str) -> int:
    first, _, last = request.rpartition("bytes=")[2].partition("-")
    return int(last) - int(first) + 1 if "bytes=" in request else 0


def test_metadata_masks_and_folders_with_repeats(server, tmp_path):
    folder = tmp_path / "set"
    write_files(folder / "images", ["1.png", "2.png", "b/3.png"])
    write_files(folder / "masks", {name: encode_image(9) for name in ("1.png", "2.png")})
    lines = [{"file_name": name, "text": f"caption {name}"} for name in ("1.png", "2.png", "b/3")]
    write_files(folder, {"images/meta.jsonl": "\n".join(map(json.dumps, lines))})
    write_files(folder / "train", ["2_mika dog/1.png", "10_mika/2.png"])
    url = server.upload_folder(folder, "kinds")
    for subset in (
        "metadata_file = '{}/images/meta.jsonl'",
        "metadata_file = '{}/images/meta.jsonl'\nimage_dir = '{}/images'",
    ):
        local, remote = (prepare_subsets(tmp_path, subset.replace("{}", str(root))) for root in (folder, url))
        assert len(remote.manifest.samples) == 3
        assert_same_training(local, remote)
    subset = "image_dir = '{}/images'\nconditioning_data_dir = '{}/masks'"
    local, remote = (
        prepare_subsets(tmp_path, subset.replace("{}", str(root)), masked_loss=True) for root in (folder, url)
    )
    assert [sample.mask is not None for sample in remote.manifest.samples] == [True, True]
    assert_same_training(local, remote)
    from library.config.schema_data import DataConfig
    from library.config.types import Resolution

    local, remote = (
        prepare_data(DataConfig(train_data_dir=f"{root}/train", resolution=Resolution(64, 64)), 8)
        for root in (folder, url)
    )
    assert [sample.repeats for sample in remote.manifest.samples] == [10, 2]
    assert_same_training(local, remote)
    # A local list of URLs, and a parquet column of them.
    with run_file_server(folder / "images") as http:
        urls = [f"{http}/1.png?signature=geheim", f"{http}/b/3.png", f"{url}/images/2.png"]
        rows = [json.dumps({"image_path": name, "caption": "x"}) for name in urls]
        write_files(tmp_path, {"urls.jsonl": "\n".join(rows)})
        remote = prepare_subsets(tmp_path, f"metadata_file = '{tmp_path}/urls.jsonl'")
        assert [sample.image.name for sample in remote.manifest.samples] == ["1.png", "3.png", "2.png"]
        assert "geheim" not in str(remote.manifest)
        write_files(tmp_path, {"urls.jsonl": rows[0].replace("1.png", "4.png")})
        with pytest.raises((ConfigError, FileError), match=r"urls.jsonl:1: http://\S+/4.png: does not exist"):
            prepare_subsets(tmp_path, f"metadata_file = '{tmp_path}/urls.jsonl'")


def test_every_problem_is_one_line_with_the_key_the_url_and_what_to_do(server, tmp_path, monkeypatch):
    url = server.upload_folder(write_pictures(tmp_path / "local"), "set")
    server.client.create_bucket(Bucket="empty-bucket")
    cases = {
        "image_dir = 's3://no-such-bucket/x'": "s3://no-such-bucket/x: the bucket 'no-such-bucket' does not exist",
        "image_dir = 's3://My Bucket/x'": 's3://My Bucket/x: Parameter validation failed: Invalid bucket name "My Bucket',
        f"image_dir = 's3://{BUCKET}/sett'": f"{url}t does not exist; s3://{BUCKET} contains ",
        "image_dir = 's3://empty-bucket'": "s3://empty-bucket is empty",
        "image_dir = 's3://'": "s3://: names no bucket",
        f"cache_directory = 's3://cache'\nimage_dir = '{url}'": "s3://cache is a URL; files are written to folders only",
        "image_dir = 'https://host/x'": "https://host/x: https servers list no folders; give the URLs of tar",
        "image_dir = 'ftp://host/x'": "ftp://host/x: ftp:// is not supported; use s3://, gs://, hf://, https://",
        f"image_dir = '{url}/c#d.png'": f"{url}/c#d.png is a file, not a folder",
        f"metadata_file = '{url}'": f"{url} is a folder, not a file",
        f"metadata_file = '{url}/x.jsonl'": f"{url}/x.jsonl does not exist; {url} contains a b.png",
        f"webdataset = '{url}/*.tar'": f"{url}/*.tar does not exist; {url} contains a b.png",
        f"webdataset = '{url}'": f"no .tar files in {url}, which contains",
        "webdataset = 'gs://bucket/x.tar'": "gs://bucket/x.tar: gs:// needs gcsfs: pip install gcsfs",
        "parquet = 'http://127.0.0.1:9/x.parquet?sig=geheim'": "http://127.0.0.1:9/x.parquet: no answer from the server",
    }
    for subset, expected in cases.items():
        config = make_config(tmp_path, subset, remote_retry_seconds=0.0)
        problems = strip_folder(tmp_path, format_lines(validate_dataset_config(config)))
        key = subset.partition(" ")[0]
        assert any(problem.startswith(f"set.toml:4: {key}: {expected}") for problem in problems), problems
        assert not any("geheim" in problem or "\n" in problem for problem in problems)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    (problem,) = format_lines(validate_dataset_config(make_config(tmp_path, f"image_dir = '{url}'")))
    assert "credentials are missing or not valid" in problem and "set AWS_ACCESS_KEY_ID" in problem
    s3fs.S3FileSystem.clear_instance_cache()


def test_faults_of_the_server_change_nothing(server, tmp_path):
    folder = write_pictures(tmp_path / "local")
    url = server.upload_folder(folder, "faults")
    expected = prepare_subsets(tmp_path, f"image_dir = '{folder}'")
    for kind in ("503", "cut", "reset", "slow"):
        server.proxy.faults += [f"{kind} list-type", f"{kind} [.]png", f"{kind} [.]png", f"{kind} [.]txt"]
        cache = str(tmp_path / f"cache {kind}")
        remote = prepare_subsets(tmp_path, f"image_dir = '{url}'", remote_cache_dir=cache)
        assert_same_training(expected, remote)
        assert not server.proxy.faults
    server.proxy.faults += ["503 c#d[.]png"] * 100
    with pytest.raises(FileError, match=r"^s3://.*/c#d.png: the server fails \(.*reduce your request rate.*kept$"):
        options = {"remote_cache_dir": str(tmp_path / "cache down"), "remote_retry_seconds": 1.0}
        prepare_subsets(tmp_path, f"image_dir = '{url}'", **options)
    server.proxy.faults.clear()


def test_a_file_that_changes_on_the_server_is_never_trained_as_the_old_one(server, tmp_path):
    from library.dataloader.images import BadSample, CropParams, load_sample_pixels

    folder = write_pictures(tmp_path / "local")
    url = server.upload_folder(folder, "changing")
    first = prepare_subsets(tmp_path, f"image_dir = '{url}'")
    server.upload({"changing/c#d.png": encode_image(77), "changing/ü.txt": b"another caption"})
    second = prepare_subsets(tmp_path, f"image_dir = '{url}'")
    differing = [
        one.image.name
        for one, other in zip(first.manifest.samples, second.manifest.samples, strict=True)
        if (one.content_hash, one.caption) != (other.content_hash, other.caption)
    ]
    assert differing == ["c#d.png", "ü.png"]
    # A run that has started, and whose cache has lost the image, finds another one on the server.
    for path in (tmp_path / "xdg" / "lorikeet" / "remote").rglob("*"):
        if path.is_file() and "folders" not in str(path):
            path.unlink()
    sample = next(sample for sample in first.manifest.samples if sample.image.name == "c#d.png")
    index = first.manifest.samples.index(sample)
    loaded = load_sample_pixels(sample, first.assignments[index], CropParams((0, 0), False, None))
    assert isinstance(loaded, BadSample) and "changed" in loaded.problem, loaded


def test_many_pictures(server, tmp_path):
    """Prints the seconds of planning from S3, in a folder and in tars, beside those of a local folder."""
    folder, count = tmp_path / "many", int(os.environ.get("MANY_PICTURES", "500"))
    folder.mkdir()
    lines = []
    for number in range(count):
        (folder / f"{number:05d}.png").write_bytes(encode_image(number))
        lines.append(json.dumps({"file_name": f"{number:05d}.png", "text": f"caption {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    (tmp_path / "tars").mkdir()
    for shard in range(10):
        with tarfile.open(tmp_path / "tars" / f"{shard}.tar", "w") as tar:
            for number in range(count * shard // 10, count * (shard + 1) // 10):
                tar.add(folder / f"{number:05d}.png", f"{number:05d}.png")
                text = tarfile.TarInfo(f"{number:05d}.txt")
                data = f"caption {number}".encode()
                text.size = len(data)
                tar.addfile(text, io.BytesIO(data))
    url, tars = server.upload_folder(folder, "many"), server.upload_folder(tmp_path / "tars", "tars")
    seconds, prepared = {}, {}
    for name, subset in (
        ("local folder", f"image_dir = '{folder}'"),
        ("local folder again", f"image_dir = '{folder}'"),
        ("S3 folder", f"image_dir = '{url}'"),
        ("S3 folder again", f"image_dir = '{url}'"),
        ("S3 tars", f"webdataset = '{tars}'"),
        ("S3 tars again", f"webdataset = '{tars}'"),
    ):
        server.proxy.requests.clear()
        started = time.monotonic()
        prepared[name] = prepare_subsets(tmp_path, subset)
        seconds[name] = time.monotonic() - started
        print(f"\n{name}: {seconds[name]:.1f} s, {len(server.proxy.requests)} requests", end="")
    print()
    assert (
        prepared["S3 folder"].manifest.compute_fingerprint() == prepared["local folder"].manifest.compute_fingerprint()
    )
    assert len(prepared["S3 tars again"].manifest.samples) == count
    assert server.proxy.max_at_once > 16


def test_a_server_that_fails_is_no_fault_of_the_images(server, tmp_path):
    """With --on_invalid_images skip, nothing is left out because the server could not be asked."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "local"
    write_files(folder / "images", {"1.png": encode_image(1), "1.txt": "one", "2.png": encode_image(2), "2.txt": "two"})
    write_files(folder / "masks", ["1.png", "2.png"])
    pyarrow.parquet.write_table(
        pyarrow.table({"image": [encode_image(1)] * 2, "text": ["one", "two"]}), folder / "a.parquet"
    )
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.add(folder / "images", ".")
    for name in ("tar", "parquet"):
        (folder / f"b.{name}").write_bytes((folder / f"a.{name}").read_bytes())
    url = server.upload_folder(folder, "failing")
    for number, (subset, pattern) in enumerate(
        {
            f"image_dir = '{url}/images'": "1[.]txt",
            f"image_dir = '{url}/images' ": "2[.]png",
            f"image_dir = '{url}/images'\nconditioning_data_dir = '{url}/masks'": "list-type.*masks.*delimiter=/",
            f"webdataset = ['{url}/a.tar', '{url}/b.tar']": "a[.]tar bytes",
            f"parquet = ['{url}/a.parquet', '{url}/b.parquet']": "a[.]parquet bytes",
            f"metadata_file = '{url}/a.parquet'": "a[.]parquet bytes",
        }.items()
    ):
        options = {
            "remote_cache_dir": str(tmp_path / f"cache {number}"),
            "remote_retry_seconds": 0.3,
            "masked_loss": "masks" in subset,
        }
        server.proxy.failing_after = pattern, 0
        server.proxy.requests.clear()
        try:
            with pytest.raises((ConfigError, FileError), match=r"s3://\S+: .*the server fails .*SlowDown"):
                prepare_subsets(tmp_path, subset, on_invalid_images="skip", **options)
        finally:
            server.proxy.failing_after = None
