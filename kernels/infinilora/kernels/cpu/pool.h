// The one thread pool of the process. Knows no kernel.
//
// A job is `num_chunks` calls of `run(job, chunk, thread)`. Chunks are taken from an atomic counter by the
// caller and by whichever workers are awake, so the work divides itself: a core that is lent to another
// process takes fewer chunks, and a worker that wakes late finds the job done.
#pragma once

#include <cstddef>

namespace il {

using RunChunk = void (*)(const void* job, int chunk, int thread);

// Runs every chunk, and returns when all are done. May be called from any thread; while the pool is busy
// with another caller's job, or inside one, the caller runs its chunks alone.
void parallel_for(int num_chunks, const void* job, RunChunk run);

// `body(chunk, thread)` for each chunk.
template <class Body>
void parallel_chunks(int num_chunks, const Body& body) {
  parallel_for(num_chunks, &body, [](const void* job, int chunk, int thread) {
    (*static_cast<const Body*>(job))(chunk, thread);
  });
}

int num_threads();

// At least `bytes` of memory, aligned to 64, that belong to the calling thread until its next call.
void* scratch(size_t bytes);

}  // namespace il
