"""The places pictures come from: folders, metadata files, parquet files and tar shards."""
