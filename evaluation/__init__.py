"""Labels, statistics, the release gate and the feedback policy."""
