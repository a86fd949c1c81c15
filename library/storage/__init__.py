"""Remote files: URLs as paths, the file systems behind them, retries, and a bounded cache of their bytes on disk."""
