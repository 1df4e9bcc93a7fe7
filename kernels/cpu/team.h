// The threads of one forward pass and the phases that they go through together.
//
// A phase is over when its work is done, not when every thread has arrived: a thread that the machine holds up in between
// finds later that others went on, and catches up. Only what a thread holds while it is held up has to be waited for, so
// pieces are small. One parallel region holds the whole pass; a phase costs two atomic counters.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedd::cpu {

struct alignas(64) Phase {
  std::atomic<int> next{0};  // first piece that nobody has taken
  alignas(64) std::atomic<int> done{0};
};

// One thread's way through the phases; all threads go through the same ones in the same order.
class Member {
 public:
  Member(std::vector<Phase>& phases, int thread) : phases_(phases), thread_(thread) {}

  int thread() const { return thread_; }

  // Calls work(begin, end) for pieces of [0, count), each `step` long or less, as long as there are any, and returns when
  // all of them are done, by whomever. What the pieces wrote is visible then.
  template <class Work>
  void share(int count, int step, Work work) {
    assert(index_ < phases_.size());
    Phase& phase = phases_[index_++];
    for (int begin; (begin = phase.next.fetch_add(step, std::memory_order_relaxed)) < count;) {
      const int end = std::min(begin + step, count);
      work(begin, end);
      phase.done.fetch_add(end - begin, std::memory_order_acq_rel);
    }
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < count; ++spins) {
      // Others may need the processor that is waited on: after a while it is given away.
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  std::vector<Phase>& phases_;
  const int thread_;
  size_t index_ = 0;
};

}  // namespace pagedd::cpu
