// The ring core of a `shm` link as Python calls it (ring.py): a function for each hot operation.
//
//   layout.h      the file that both ends map, how its words are written, and why nobody waits in a circle
//   frame.h       what a frame in it says
//   bells.h       waiting for the other end, and waking it
//   rows.h        moving rows in and out
//   engine_end.h  sends site calls and takes the answers
//   server_end.h  takes the calls and answers them
//
// All of it is one translation unit, so that the compiler sees every operation whole.

#include <cstdlib>

#include "engine_end.h"
#include "server_end.h"

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
