// Loaded before the C library: counts what is asked of it for memory, and asks it.
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static long asked;

long num_allocations() { return __atomic_load_n(&asked, __ATOMIC_RELAXED); }

static void count() { __atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED); }

void* malloc(size_t bytes) { return count(), __libc_malloc(bytes); }
void* calloc(size_t number, size_t bytes) { return count(), __libc_calloc(number, bytes); }
void* realloc(void* memory, size_t bytes) { return count(), __libc_realloc(memory, bytes); }
void* memalign(size_t to, size_t bytes) { return count(), __libc_memalign(to, bytes); }
void* aligned_alloc(size_t to, size_t bytes) { return count(), __libc_memalign(to, bytes); }
}
