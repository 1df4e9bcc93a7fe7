// The threads of one forward pass: a barrier that also hands out work.
//
// One parallel region holds the whole pass; inside it, phases follow each other at the price of a barrier. Work of a
// phase is taken piece by piece, so that a thread that the machine holds up does not hold up the others by more than one.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedd::cpu {

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  int size() const { return size_; }

  // Returns once every thread has called it; what they wrote before is visible after. Work starts again at 0.
  void barrier() {
    if (size_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      return;
    }
    const int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
      // Others may need the processor that is waited on: after a while it is given away.
      if (spins < kSpins)
        pause();
      else
        std::this_thread::yield();
    }
  }

  // Calls work(begin, end) for pieces of [0, count), each `step` long or less, until none is left; then the barrier.
  template <class Work>
  void share(int count, int step, Work work) {
    for (int begin; (begin = next_.fetch_add(step, std::memory_order_relaxed)) < count;)
      work(begin, std::min(begin + step, count));
    barrier();
  }

 private:
  static constexpr int kSpins = 2000;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  const int size_;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
};

}  // namespace pagedd::cpu
