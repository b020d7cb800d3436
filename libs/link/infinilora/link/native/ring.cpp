// The ring core: a pair of rings of fixed-size buffers in a file that two processes map.
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
// never waits to write, hence neither end can wait for the other in a circle. A reader spins for a bounded
// time, then sleeps on its bell (a futex word); a writer wakes it only when it says that it sleeps.
//
// Python mirrors of these layouts: link/frame.py (FrameHeader), link/layout.py (FileHeader), link/ring.py (Ticket).

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "moves.h"

// Of the kernels, in the same library (kernels/cpu): 0 portable, 1 AVX2, 2 AVX-512; and their threads.
extern "C" int il_level();
namespace il {
void parallel_for(int num_chunks, const void* job, void (*run)(const void* job, int chunk, int thread));
void wake_after_next_job(uint32_t* word);
void wake_owed();
}

namespace {

using namespace elements;

constexpr uint64_t kRingsAt = 4096;
constexpr uint64_t kAlign = 64;
constexpr uint64_t kPieceBytes = 48 * 1024;  // a worker's part of a move: several times what handing it over costs
constexpr int64_t kShortSpinNs = 5'000;     // before any yield; and all the spinning there is on a crowded core
constexpr int64_t kLongYieldNs = 50'000;    // a yield that took so long gave the core to somebody who keeps it
constexpr uint32_t kCrowdedWaits = 64;      // for so many waits: a sleeper is woken sooner than a yielder gets its turn
constexpr uint32_t kMaxRuns = 3;           // as MAX_RUNS in frame.py
constexpr int64_t kSleepSliceNs = 20'000'000;  // a lost wake-up (a peer without this library) costs at most this

enum Status : int { kOk = 0, kTimeout = 1, kClosed = 2, kRefused = 3, kBlocked = 4, kCorrupt = 5 };
enum Kind : uint32_t { kPlan = 1, kSite = 2, kReply = 3, kError = 4 };
enum Flag : uint32_t { kLast = 1, kHasIds = 2, kHasWeights = 4, kHasRows = 8, kHasRuns = 16 };
enum State : uint32_t { kAbsent = 0, kOpen = 1, kShut = 2, kQuarantined = 3 };
enum Chunk : uint8_t { kDone = 0, kOutstanding = 1, kAbandoned = 2 };

struct FrameHeader {
  uint64_t word;
  uint32_t kind, flags;
  uint64_t step_id, sequence;
  uint32_t layer, site, row_start, rows, in_cols, out_cols;
  uint32_t in_begin, in_end, out_begin, out_end;
  uint32_t topk, dtype;
  uint64_t payload_bytes;
  int64_t began_ns;  // of an answer: when the server took the call up and had computed it, on its monotonic clock
  uint8_t trace[24];  // with kHasRuns: kMaxRuns pairs of columns [begin, end), zeros where there are fewer
  int64_t ended_ns;
};
static_assert(sizeof(FrameHeader) == 128, "frame.py packs 128 bytes");

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

struct Engine;

struct Ticket {  // a site call of one shape, cut into chunks. Made by Python, sent again and again, once at a time
  FrameHeader header;  // step_id, layer and trace are those of the call under way
  Engine* engine;
  uint64_t x_stride, x_row;     // bytes from row to row; bytes of a row
  uint64_t ids_stride, weights_stride, topk_row;
  uint64_t rows, chunk_rows;
  int64_t out_stride;
  uint32_t out_dtype, chunks;
  uint64_t x, ids, weights, first;  // from here on: of the call under way
  int64_t sent_ns;
  int64_t waited_ns;                // inside `collect`, for chunks that were not there yet
  int64_t began_ns, ended_ns;       // when the server computed: from its first chunk to its last
  uint64_t refusal;                 // where in the file the frame that says no lies
  uint32_t sent, received;
};

struct Rings {
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

char* payload(FrameHeader* frame) { return reinterpret_cast<char*>(frame) + sizeof(FrameHeader); }

template <class T> T load(const T* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
template <class T> void store(T* at, T value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

uint64_t aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// FUTEX_WAIT and FUTEX_WAKE without the private flag: the word is in shared memory.
void futex_sleep(uint32_t* word, uint32_t expected, int64_t ns) {
  timespec t{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

void wake(Signals& end) {
  __atomic_fetch_add(&end.bell, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &end.bell, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

bool is_waiting(const Signals& end) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // what was published is visible before `waiting` is read
  return load(&end.waiting);
}

void wake_if_waiting(Signals& end) {
  if (is_waiting(end)) wake(end);
}

// The same, but the caller's next product comes first: a sleeper is often put on the core that wakes it, and computes
// there while the others would have nothing to do. The bell has rung, so whoever is about to sleep looks again.
void wake_behind_next_job(Signals& end) {
  if (!is_waiting(end)) return;
  __atomic_fetch_add(&end.bell, 1, __ATOMIC_SEQ_CST);
  il::wake_after_next_job(&end.bell);
}

bool is_shut(const Signals& end) { return load(&end.state) >= kShut; }

// Let others have the core, as long as they give it back soon. On an idle core a yield costs nothing and the
// waiter stays awake; on a crowded one a yielder waits for a whole time slice, and a sleeper is woken at once.
void yield(Rings& r, int64_t now) {
  sched_yield();
  if (now_ns() - now > kLongYieldNs) r.crowded = kCrowdedWaits;
}

// Wait until ready(): spin, then sleep on `mine`. What arrived before a close is still delivered.
template <class Ready> Status await(Rings& r, Signals& mine, Signals& peer, int64_t deadline, Ready ready) {
  if (ready()) return kOk;
  const int64_t start = now_ns();
  if (r.crowded) --r.crowded;
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return kOk;
      relax();
    }
    if (is_shut(mine) || is_shut(peer)) return ready() ? kOk : kClosed;
    const int64_t now = now_ns();
    if (now >= deadline) return kTimeout;
    if (now - start < (r.crowded ? kShortSpinNs : r.spin_ns)) {
      if (now - start >= kShortSpinNs) yield(r, now);
      continue;
    }
    __atomic_store_n(&mine.waiting, 1u, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    const uint32_t bell = load(&mine.bell);
    if (!ready() && !is_shut(mine) && !is_shut(peer)) {
      const int64_t left = deadline - now;
      futex_sleep(&mine.bell, bell, left < kSleepSliceNs ? left : kSleepSliceNs);
    }
    store(&mine.waiting, 0u);
  }
}

int64_t deadline_after(int64_t timeout_ns) { return now_ns() + timeout_ns; }

// Taking an answer ------------------------------------------------------------------------------------------

struct Target {  // where a delta goes: row r of the site call at out + r * stride
  char* out;
  int64_t stride;
  uint32_t dtype;
  bool add;
};

const moves::Table& best_moves() {
#if defined(__x86_64__)
  switch (il_level()) {
    case 2: return moves::kAvx512;
    case 1: return moves::kAvx2;
  }
#endif
  return moves::kPortable;
}

// move(first, rows) for all rows, in pieces that the kernels' threads share where there is enough to move: between two
// products they are awake and idle, and one core alone draws but a part of what the memory gives.
template <class Move> void share_rows(uint64_t rows, uint64_t row_bytes, const Move& move) {
  struct Job {
    const Move& move;
    uint64_t rows, pieces;
  };
  uint64_t pieces = rows * row_bytes / kPieceBytes;
  if (pieces > rows) pieces = rows;
  if (pieces < 2) return move(0, rows);
  const Job job{move, rows, pieces};
  il::parallel_for(int(pieces), &job, [](const void* data, int piece, int) {
    const Job& j = *static_cast<const Job*>(data);
    const uint64_t first = j.rows * piece / j.pieces, end = j.rows * (piece + 1) / j.pieces;
    j.move(first, end - first);
  });
}

void take_rows(const char* in, uint32_t dtype, const Target& to, uint64_t row0, uint64_t rows, uint64_t cols) {
  const auto take = best_moves().take[dtype][to.dtype][to.add];
  char* out = to.out + int64_t(row0) * to.stride;
  const uint64_t row_bytes = cols * width(dtype);
  const bool is_dense = to.stride == int64_t(cols * width(to.dtype));
  share_rows(rows, row_bytes, [&](uint64_t first, uint64_t count) {
    const char* from = in + first * row_bytes;
    char* at = out + int64_t(first) * to.stride;
    if (is_dense) return take(from, at, count * cols);
    for (uint64_t r = 0; r < count; ++r) take(from + r * row_bytes, at + int64_t(r) * to.stride, cols);
  });
}

void copy_rows(char* to, uint64_t from, uint64_t stride, uint64_t row_bytes, uint64_t row0, uint64_t rows) {
  const char* at = reinterpret_cast<const char*>(from) + row0 * stride;
  share_rows(rows, row_bytes, [&](uint64_t first, uint64_t count) {
    const char* in = at + first * stride;
    char* out = to + first * row_bytes;
    if (stride == row_bytes) return void(best_moves().copy(out, in, count * row_bytes));
    for (uint64_t r = 0; r < count; ++r) best_moves().copy(out + r * row_bytes, in + r * stride, row_bytes);
  });
}

// The engine's end ------------------------------------------------------------------------------------------

struct Engine : Rings {    // begins as zeros
  uint64_t written;        // request frames written, plans included
  uint64_t next;           // the sequence the next ticket's first chunk gets
  uint64_t sent;           // chunks [0, sent) are in the ring or answered; sent <= next
  uint64_t oldest;         // chunks [0, oldest) have given their reply buffer back
  uint64_t stale;          // replies dropped: nobody waits for them any more
  uint8_t trace[24];       // of the step that the latest plan began
  uint8_t state[];         // of chunk s at [s % n], for s in [oldest, sent)

  bool arrived(uint64_t s) const { return load(&reply(s)->word) == s + 1; }
  bool has_room() const { return written - load(&file->consumed) < n; }

  bool has_credit() {
    for (; oldest < sent; ++oldest) {
      const uint8_t is = state[oldest % n];
      if (is == kOutstanding || (is == kAbandoned && !arrived(oldest))) break;
      stale += is == kAbandoned;
      state[oldest % n] = kDone;
    }
    return sent - oldest < n;
  }

  bool can_send(const Ticket& t) { return t.sent < t.chunks && t.first + t.sent == sent && has_room() && has_credit(); }

  void publish(FrameHeader* frame) { store(&frame->word, ++written); }

  void send_chunk(Ticket& t) {
    const uint64_t row0 = uint64_t(t.sent) * t.chunk_rows;
    const uint64_t rows = t.rows - row0 < t.chunk_rows ? t.rows - row0 : t.chunk_rows;
    FrameHeader* frame = request(written);
    char* body = payload(frame);
    uint64_t bytes = rows * t.x_row;
    copy_rows(body, t.x, t.x_stride, t.x_row, row0, rows);
    if (t.ids) {
      bytes = aligned(bytes);
      copy_rows(body + bytes, t.ids, t.ids_stride, t.topk_row, row0, rows);
      bytes += rows * t.topk_row;
    }
    if (t.weights) {
      copy_rows(body + bytes, t.weights, t.weights_stride, t.topk_row, row0, rows);
      bytes += rows * t.topk_row;
    }
    std::memcpy(&frame->kind, &t.header.kind, sizeof(FrameHeader) - sizeof(frame->word));
    frame->sequence = sent;
    frame->row_start = uint32_t(t.header.row_start + row0);
    frame->rows = uint32_t(rows);
    if (t.sent + 1 == t.chunks) frame->flags |= kLast;
    frame->payload_bytes = bytes;
    state[sent % n] = kOutstanding;
    ++sent;
    ++t.sent;
    publish(frame);
    wake_behind_next_job(file->server);
  }

  void pump(Ticket& t) {
    while (can_send(t)) send_chunk(t);
  }

  void submit(Ticket& t, uint64_t step_id, uint32_t layer, uint64_t x, uint64_t ids, uint64_t weights) {
    t.sent_ns = now_ns();
    t.header.step_id = step_id;
    t.header.layer = layer;
    if (!(t.header.flags & kHasRuns)) std::memcpy(t.header.trace, trace, sizeof(trace));
    t.x = x;
    t.ids = ids;
    t.weights = weights;
    t.sent = t.received = 0;
    t.waited_ns = 0;
    t.first = next;
    next += t.chunks;
    pump(t);
  }

  void abandon() {
    for (uint64_t s = oldest; s < sent; ++s)
      if (state[s % n] == kOutstanding) state[s % n] = kAbandoned;
    next = sent;  // what was not sent never will be
    has_credit();
  }

  Status take(Ticket& t, uint64_t s, const Target& to) {
    FrameHeader* frame = reply(s);
    const uint64_t row0 = uint64_t(t.received) * t.chunk_rows;
    const uint64_t rows = t.rows - row0 < t.chunk_rows ? t.rows - row0 : t.chunk_rows;
    if (frame->step_id != t.header.step_id || frame->sequence != s || frame->payload_bytes > capacity) return kCorrupt;
    if (frame->kind == kError) {
      t.refusal = uint64_t(reinterpret_cast<char*>(frame) - base);
      return kRefused;
    }
    const uint64_t cols = t.header.out_cols;
    if (frame->kind != kReply || frame->rows != rows || frame->payload_bytes != rows * cols * width(t.header.dtype))
      return kCorrupt;
    if (t.received == 0) t.began_ns = frame->began_ns;
    t.ended_ns = frame->ended_ns;
    take_rows(payload(frame), t.header.dtype, to, row0, rows, cols);
    return kOk;
  }

  Status collect(Ticket& t, const Target& to, int64_t deadline) {
    while (t.received < t.chunks) {
      pump(t);
      if (t.received == t.sent && t.first + t.sent != sent) return kBlocked;  // an earlier ticket must be collected first
      const uint64_t s = t.first + t.received;
      const auto ready = [&] { return (t.received < t.sent && arrived(s)) || can_send(t); };
      if (!ready()) {
        il::wake_owed();
        const int64_t from = now_ns();
        const Status status = await(*this, file->engine, file->server, deadline, ready);
        t.waited_ns += now_ns() - from;
        if (status != kOk) return status;
      }
      if (t.received == t.sent || !arrived(s)) continue;
      const Status taken = take(t, s, to);
      state[s % n] = kDone;
      ++t.received;
      if (taken != kOk) return taken;
    }
    return kOk;
  }
};

// Whether the fields of a frame agree with one another and with the buffers. As Header.check in frame.py.
bool fits(const FrameHeader& h, uint64_t capacity) {
  const uint64_t rows = h.rows;
  if (h.dtype > kF16) return false;
  if (h.kind == kPlan) return h.payload_bytes == rows * 16 && h.payload_bytes <= capacity;
  if (h.kind != kSite) return false;
  if (h.flags & kHasRows && (!(h.flags & kHasIds) || h.topk < 2)) return false;
  if (rows * h.in_cols > capacity) return false;  // also keeps what follows from overflowing
  uint64_t bytes = rows * h.in_cols * width(h.dtype);
  const uint64_t routed = ((h.flags & kHasIds) != 0) + ((h.flags & kHasWeights) != 0);
  if (bytes > capacity || rows * h.topk > capacity) return false;
  if (routed) bytes = aligned(bytes) + routed * rows * h.topk * 4;
  return bytes == h.payload_bytes && bytes <= capacity && rows * h.out_cols <= capacity &&
         rows * h.out_cols * width(h.dtype) <= capacity;
}

// The server's end ------------------------------------------------------------------------------------------

// Computes one site call, in fp32, into `out`; anything but 0: it did not, the frame is for Python.
using Compute = int32_t (*)(void* program, uint64_t step_id, uint32_t layer, uint32_t site, uint32_t row_start,
                            uint32_t rows, uint32_t in_cols, uint32_t out_cols, uint32_t in_begin, uint32_t in_end,
                            uint32_t topk, uint32_t has_rows, const uint32_t* runs, uint32_t num_runs, const float* x,
                            const int32_t* ids, const float* weights, float* out);

struct Times {  // of site calls computed; written by the serving thread alone
  uint64_t calls;
  int64_t last_ns, sum_ns;  // when the latest ended, on the monotonic clock; all of them together
  const int64_t* bounds;    // [num_bounds], rising
  uint64_t* counts;         // [num_bounds + 1]: calls that took at most bounds[i]; the last one: longer
  uint64_t num_bounds;

  void add(int64_t started, int64_t ended) {
    const int64_t took = ended - started;
    uint64_t i = 0;
    while (i < num_bounds && took > bounds[i]) ++i;
    ++counts[i];
    ++calls;
    sum_ns += took;
    last_ns = ended;
  }
};

struct Server : Rings {  // begins as zeros
  uint64_t taken;        // request frames done with
  int64_t began_ns;      // when the frame in hand was taken up
  float wide[];          // [capacity]: the input and the delta of a call in two-byte elements

  void release() {
    store(&file->consumed, ++taken);
    wake_if_waiting(file->engine);
  }

  Status recv(int64_t timeout_ns, FrameHeader** found) {
    FrameHeader* frame = *found = request(taken);
    const uint64_t word = taken + 1;
    if (is_shut(file->engine) || is_shut(file->server)) return kClosed;  // nobody waits for what is still there
    const Status status = await(*this, file->server, file->engine, deadline_after(timeout_ns),
                                [&] { return load(&frame->word) == word; });
    began_ns = now_ns();
    return status == kOk && !fits(*frame, capacity) ? kCorrupt : status;
  }

  // Publish the reply to the frame in hand (its payload is in the reply buffer already) and give the frame back.
  // Returns when the computing ended.
  int64_t answer(uint32_t kind, uint64_t payload_bytes) {
    const FrameHeader* from = request(taken);
    FrameHeader* frame = reply(from->sequence);
    std::memcpy(&frame->kind, &from->kind, sizeof(FrameHeader) - sizeof(frame->word));
    frame->kind = kind;
    frame->payload_bytes = payload_bytes;
    frame->began_ns = began_ns;
    const int64_t ended = frame->ended_ns = now_ns();
    store(&frame->word, from->sequence + 1);
    release();
    return ended;
  }

  bool computes(FrameHeader* h, Compute compute, void* program) {
    if (h->kind != kSite) return false;
    const bool has_runs = h->flags & kHasRuns;
    const auto* runs = has_runs ? reinterpret_cast<const uint32_t*>(h->trace) : &h->out_begin;
    uint32_t num_runs = 0;
    while (num_runs < (has_runs ? kMaxRuns : 1) && runs[2 * num_runs + 1]) ++num_runs;
    if (has_runs && !num_runs) return false;
    const uint64_t rows = h->rows, inputs = rows * h->in_cols, outputs = rows * h->out_cols;
    char *x = payload(h), *out = payload(reply(h->sequence));
    char* ids = x + aligned(inputs * width(h->dtype));
    char* weights = h->flags & kHasIds ? ids + rows * h->topk * 4 : ids;
    auto *x32 = reinterpret_cast<float*>(x), *out32 = reinterpret_cast<float*>(out);
    if (h->dtype != kF32) {
      x32 = wide, out32 = wide + inputs;
      best_moves().take[h->dtype][kF32][0](x, reinterpret_cast<char*>(x32), inputs);
    }
    if (compute(program, h->step_id, h->layer, h->site, h->row_start, h->rows, h->in_cols, h->out_cols, h->in_begin,
                h->in_end, h->topk, h->flags & kHasRows, runs, num_runs, x32,
                h->flags & kHasIds ? reinterpret_cast<int32_t*>(ids) : nullptr,
                h->flags & kHasWeights ? reinterpret_cast<float*>(weights) : nullptr, out32))
      return false;
    if (h->dtype != kF32) best_moves().take[kF32][h->dtype][0](reinterpret_cast<char*>(out32), out, outputs);
    return true;
  }

  Status serve(int64_t timeout_ns, Compute compute, void* program, Times& times, FrameHeader** found) {
    for (;;) {
      const Status status = recv(timeout_ns, found);
      if (status != kOk) return status;
      if (!computes(*found, compute, program)) return kOk;
      const uint64_t outputs = uint64_t((*found)->rows) * (*found)->out_cols;
      times.add(began_ns, answer(kReply, outputs * width((*found)->dtype)));
    }
  }

  uint64_t offset_of(const FrameHeader* frame) const {
    return uint64_t(reinterpret_cast<const char*>(frame) - base);
  }
};

}  // namespace

extern "C" {

// The private state of one end of the file mapped at `base`; null without memory for it.
Engine* il_ring_engine_open(char* base, int64_t spin_ns) {
  const uint64_t chunks = reinterpret_cast<FileHeader*>(base)->num_buffers;
  Engine* e = static_cast<Engine*>(std::calloc(1, sizeof(Engine) + chunks));
  if (e) e->open(base, spin_ns);
  return e;
}

Server* il_ring_server_open(char* base, int64_t spin_ns) {
  const uint64_t capacity = reinterpret_cast<FileHeader*>(base)->buffer_bytes;
  Server* s = static_cast<Server*>(std::calloc(1, sizeof(Server) + capacity * sizeof(float)));  // untouched: not there
  if (s) s->open(base, spin_ns);
  return s;
}

void il_ring_free(void* end) { std::free(end); }

// Say that one end (0: engine, 1: server) is open, shut or quarantined, and wake whoever sleeps. Any thread.
// A state never goes back: a quarantine stays one when the end is then closed.
void il_ring_mark(char* base, int is_server, uint32_t state) {
  FileHeader* file = reinterpret_cast<FileHeader*>(base);
  uint32_t* at = is_server ? &file->server.state : &file->engine.state;
  uint32_t is = load(at);
  while (is < state && !__atomic_compare_exchange_n(at, &is, state, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  wake(file->engine);
  wake(file->server);
}

// Reserve a call's sequences and send what there is room and credit for. Never waits. The number of chunks sent.
uint32_t il_ring_submit(Ticket* t, uint64_t step_id, uint32_t layer, uint64_t x, uint64_t ids, uint64_t weights) {
  t->engine->submit(*t, step_id, layer, x, ids, weights);
  return t->sent;
}

// Take every chunk of the delta, copying or adding; sends what was left unsent on the way. The nanoseconds since the
// call was submitted, or the negative Status.
int64_t il_ring_collect(Ticket* t, char* out, int add, double timeout_s) {
  const Target to{out, t->out_stride, t->out_dtype, add != 0};
  const Status status = t->engine->collect(*t, to, deadline_after(int64_t(timeout_s * 1e9)));
  return status == kOk ? now_ns() - t->sent_ns : -int64_t(status);
}

// Send a frame that has no reply. Waits for room only: the server consumes without waiting for anybody.
int il_ring_send_plan(Engine* e, const FrameHeader* header, const char* body, uint64_t bytes, int64_t timeout_ns) {
  const Status status =
      await(*e, e->file->engine, e->file->server, deadline_after(timeout_ns), [&] { return e->has_room(); });
  if (status != kOk) return status;
  FrameHeader* frame = e->request(e->written);
  std::memcpy(payload(frame), body, bytes);
  std::memcpy(&frame->kind, &header->kind, sizeof(FrameHeader) - sizeof(frame->word));
  std::memcpy(e->trace, header->trace, sizeof(e->trace));
  e->publish(frame);
  wake_if_waiting(e->file->server);
  return kOk;
}

// Nobody waits for what is outstanding any more; what was not sent never will be.
void il_ring_abandon(Engine* e) { e->abandon(); }

uint64_t il_ring_in_flight(Engine* e) {
  e->has_credit();
  return e->sent - e->oldest;
}

uint64_t il_ring_stale(Engine* e) { return e->stale; }

// Wait for the next request frame; *offset is where it lies in the file. It is the caller's until reply or skip.
int il_ring_recv(Server* s, int64_t timeout_ns, uint64_t* offset) {
  FrameHeader* frame = nullptr;
  const Status status = s->recv(timeout_ns, &frame);
  *offset = s->offset_of(frame);
  return status;
}

// As il_ring_recv, but answers every site call that `compute` takes by itself; returns with the first other frame,
// or when none came for `timeout_ns`.
int il_ring_serve(Server* s, int64_t timeout_ns, Compute compute, void* program, Times* times, uint64_t* offset) {
  FrameHeader* frame = nullptr;
  const Status status = s->serve(timeout_ns, compute, program, *times, &frame);
  *offset = s->offset_of(frame);
  return status;
}

void il_ring_reply(Server* s, uint32_t kind, uint64_t payload_bytes) { s->answer(kind, payload_bytes); }

void il_ring_skip(Server* s) { s->release(); }

}  // extern "C"
