"""Step shapes, program keys, memory plan and compiled programs. This package holds no device buffers."""
