"""GPU telemetry: NVML read in a process of its own, frames and metrics made of what it says."""
