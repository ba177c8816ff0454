"""Units. GB/s = 1e9 bytes a second; KiB and MiB are binary; times are microseconds."""

KIB = 1024
MIB = 1024 * 1024
BYTES_PER_US_AT_1_GBPS = 1e3  # 1e9 bytes a second = 1e3 bytes a microsecond
