"""What the engine needs beyond the CPU's layers when it is compiled and captured into CUDA graphs."""
