"""What is known without a buffer: step shapes, keys, memory plan, and the compiled programs."""
