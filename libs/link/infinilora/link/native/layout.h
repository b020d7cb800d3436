// The file that two processes map: a pair of rings of fixed-size buffers. As layout.py, which makes and checks it.
//
//   0      FileHeader: who may attach, the geometry, and one cache line of signals for each end
//   4096   request ring: num_buffers x [FrameHeader | payload]      engine writes, server reads
//   then   reply ring:   num_buffers x [FrameHeader | payload]      server writes, engine reads
//
// A writer fills payload and header, then stores the buffer's `word` with release; a reader that loads the
// expected word with acquire sees everything. Request frame n lies in buffer n % N and its word is n + 1.
// The reply to site chunk s lies in reply buffer s % N with word s + 1, whatever order replies are made in.
//
// Credit: the engine sends chunk s only when reply buffer s % N is free and will stay so, hence a server
// never waits to write, hence neither end can wait for the other in a circle.
#pragma once

#include "frame.h"

namespace {

constexpr uint64_t kRingsAt = 4096;

enum State : uint32_t { kAbsent = 0, kOpen = 1, kShut = 2, kQuarantined = 3 };

struct alignas(64) Signals {  // of one end; `waiting` is written by that end, `bell` by whoever wakes it
  uint32_t state, waiting, bell;
};

struct FileHeader {
  uint64_t magic;
  uint32_t version, num_buffers;
  uint64_t buffer_bytes, stride;
  uint8_t secret[32];
  Signals engine, server;
  alignas(64) uint64_t consumed;  // request frames the server is done with
};
static_assert(sizeof(FileHeader) <= kRingsAt, "the file header fits its page");

template <class T> T load(const T* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
template <class T> void store(T* at, T value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

struct Rings {  // the file as one end of it sees it
  char* base;
  FileHeader* file;
  uint64_t n, stride, capacity;
  int64_t spin_ns;
  uint32_t crowded;  // waits to come that shall sleep early: other threads want this core

  void open(char* at, int64_t spin) {
    base = at;
    file = reinterpret_cast<FileHeader*>(at);
    n = file->num_buffers;
    stride = file->stride;
    capacity = file->buffer_bytes;
    spin_ns = spin;
  }
  FrameHeader* request(uint64_t i) const { return reinterpret_cast<FrameHeader*>(base + kRingsAt + (i % n) * stride); }
  FrameHeader* reply(uint64_t i) const {
    return reinterpret_cast<FrameHeader*>(base + kRingsAt + (n + i % n) * stride);
  }
};

}  // namespace
