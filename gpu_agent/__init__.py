"""The agent of one device: an owner process that holds the pool, a worker that searches it."""
