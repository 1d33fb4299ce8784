#include "tests/fakes/gpu/gpu_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cuda/common/gpu.cuh"
#include "tests/fakes/gpu/emulated_matrices.h"

namespace tessera::tests {
extern "C" {
// longjmp by another name: a fortified build takes a jump to another stack for one into a frame
// that is gone, and aborts.
[[noreturn]] void JumpTo(jmp_buf place, int value) noexcept(true) __asm__("_longjmp");
}

namespace {

using kernels::ElementType;

constexpr std::size_t kStackBytes = 128 * 1024;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "gpu emulator: %s\n", what);
  std::abort();
}

void Require(bool condition, const char* what) {
  if (!condition) Fail(what);
}

enum class Operation {
  kNone,
  kSyncBlock,
  kSyncWarp,
  kBallot,
  kShuffle,
  kShuffleXor,
  kLoadMatrices,
  kLoadMatricesTransposed,
  kTransposeMatrix,
  kMultiplyAdd,
  kMultiplyBytes,
};

// A lane's arguments and result of a warp operation.
struct Operand {
  std::uint64_t integer = 0;
  float real = 0;
  std::uint32_t lane = 0;  // lane number or mask
  const std::byte* row = nullptr;
  std::uint32_t* fragment = nullptr;
  float* c = nullptr;
  std::int32_t* sums = nullptr;
  const std::uint32_t* a = nullptr;
  const std::uint32_t* b = nullptr;
  ElementType type = ElementType::kBf16;
};

struct Copy {
  std::byte* target;
  const std::byte* source;  // null: zeros
  std::size_t bytes;
};

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  bool done = false;
  Operation waiting = Operation::kNone;
  Operand operand;
  std::vector<Copy> open_group;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> landed;  // waited for, but not yet visible to other threads: no barrier since
  std::unique_ptr<std::byte[]> stack;
};

// Under AddressSanitizer use swapcontext, which it can follow. Otherwise jump between stacks, which
// takes no system call.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kJump = false;
#else
constexpr bool kJump = true;
#endif

class Machine {
 public:
  Machine(const GpuLaunch& launch, const std::function<void()>& kernel)
      : launch_(launch), kernel_(kernel), random_(launch.seed), fibers_(launch.threads) {
    Require(launch.threads % kWarpLanes == 0, "a block is not of whole warps");
    shared_.resize(launch.shared_bytes + 128);
  }

  void Run();

  // Called from fibers.
  void Await(Operation operation) {
    Fiber& fiber = fibers_[current_];
    fiber.waiting = operation;
    SwitchToScheduler(fiber);
  }
  Operand& operand() { return fibers_[current_].operand; }
  Fiber& fiber() { return fibers_[current_]; }
  std::uint32_t thread() const { return current_; }
  const GpuLaunch& launch() const { return launch_; }
  std::uint32_t block[3] = {};
  std::byte* shared() {
    const auto address = reinterpret_cast<std::uintptr_t>(shared_.data());
    return shared_.data() + (128 - address % 128) % 128;
  }
  bool InShared(const std::byte* from, std::size_t bytes) {
    return from >= shared() && from + bytes <= shared() + launch_.shared_bytes;
  }
  void Enter() {
    kernel_();
    Require(fiber().groups.empty() && fiber().open_group.empty(),
            "a thread ended with copies under way");
    fiber().done = true;
    SwitchToScheduler(fiber());
  }

 private:
  void RunBlock();
  void Resume(std::uint32_t thread);
  void SwitchToScheduler(Fiber& fiber);
  bool RunWarp(std::uint32_t first);
  bool ReleaseBlock();
  bool ReleaseWarp(std::uint32_t first);
  void Execute(Operation operation, std::uint32_t first);

  const GpuLaunch launch_;
  const std::function<void()>& kernel_;
  std::mt19937_64 random_;
  std::vector<Fiber> fibers_;
  std::vector<std::byte> shared_;
  std::uint32_t current_ = 0;
  ucontext_t scheduler_;
  jmp_buf scheduler_place_;
};

thread_local Machine* machine = nullptr;

void FiberMain() { machine->Enter(); }

void Machine::SwitchToScheduler(Fiber& fiber) {
  if (kJump) {
    if (_setjmp(fiber.place) == 0) JumpTo(scheduler_place_, 1);
  } else {
    swapcontext(&fiber.context, &scheduler_);
  }
}

void Machine::Resume(std::uint32_t thread) {
  Fiber& fiber = fibers_[thread];
  current_ = thread;
  if (kJump && fiber.started) {
    if (_setjmp(scheduler_place_) == 0) JumpTo(fiber.place, 1);
    return;
  }
  if (!fiber.started) {
    fiber.started = true;
    getcontext(&fiber.context);
    if (fiber.stack == nullptr)
      fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, FiberMain, 0);
  }
  if (kJump) {
    if (_setjmp(scheduler_place_) == 0) setcontext(&fiber.context);
  } else {
    swapcontext(&scheduler_, &fiber.context);
  }
}

void Machine::RunBlock() {
  std::memset(shared_.data(), 0xff, shared_.size());
  for (Fiber& fiber : fibers_) {
    fiber.started = fiber.done = false;
    fiber.waiting = Operation::kNone;
  }
  std::vector<std::uint32_t> warps(fibers_.size() / kWarpLanes);
  for (std::uint32_t i = 0; i < warps.size(); ++i) warps[i] = i * kWarpLanes;
  for (;;) {
    std::shuffle(warps.begin(), warps.end(), random_);
    bool any = false;
    for (std::uint32_t first : warps) any |= RunWarp(first);
    const bool all_done =
        std::all_of(fibers_.begin(), fibers_.end(), [](const Fiber& fiber) { return fiber.done; });
    if (all_done) return;
    Require(any || ReleaseBlock(), "threads wait for others that will not come");
  }
}

// Runs a warp for a random time, often as far as it can go without the others. Returns false if it
// cannot run.
bool Machine::RunWarp(std::uint32_t first) {
  std::uint32_t order[kWarpLanes];
  for (std::uint32_t i = 0; i < kWarpLanes; ++i) order[i] = first + i;
  bool any = false;
  do {
    std::shuffle(order, order + kWarpLanes, random_);
    bool ran = ReleaseWarp(first);
    for (std::uint32_t thread : order) {
      if (fibers_[thread].done || fibers_[thread].waiting != Operation::kNone) continue;
      Resume(thread);
      ran = true;
    }
    if (!ran) return any;
    any = true;
  } while (random_() % 1024 != 0);
  return true;
}

void ShowLanded(Fiber& fiber) {
  for (const Copy& copy : fiber.landed) {
    if (copy.source != nullptr) {
      std::memcpy(copy.target, copy.source, copy.bytes);
    } else {
      std::memset(copy.target, 0, copy.bytes);
    }
  }
  fiber.landed.clear();
}

// Releases the block's barrier once all threads have arrived.
bool Machine::ReleaseBlock() {
  for (const Fiber& fiber : fibers_) {
    if (fiber.waiting != Operation::kSyncBlock) return false;
  }
  for (Fiber& fiber : fibers_) {
    ShowLanded(fiber);
    fiber.waiting = Operation::kNone;
  }
  return true;
}

// Executes the operation that all lanes of a warp have arrived at.
bool Machine::ReleaseWarp(std::uint32_t first) {
  const Operation operation = fibers_[first].waiting;
  if (operation == Operation::kNone || operation == Operation::kSyncBlock) return false;
  for (std::uint32_t i = 0; i < kWarpLanes; ++i) {
    Require(fibers_[first + i].waiting == operation, "lanes of a warp met in different operations");
  }
  Execute(operation, first);
  for (std::uint32_t i = 0; i < kWarpLanes; ++i) {
    fibers_[first + i].waiting = Operation::kNone;
  }
  return true;
}

void ExecuteExchange(Operation operation, Fiber* lanes) {
  Operand before[kWarpLanes];
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) before[l] = lanes[l].operand;
  std::uint64_t ballot = 0;
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) ballot |= (before[l].integer & 1) << l;
  for (std::uint32_t l = 0; l < kWarpLanes; ++l) {
    Operand& operand = lanes[l].operand;
    if (operation == Operation::kBallot) operand.integer = ballot;
    if (operation == Operation::kShuffle) {
      Require(operand.lane < kWarpLanes, "a shuffle from beyond the warp");
      operand.integer = before[operand.lane].integer;
    }
    if (operation == Operation::kShuffleXor) operand.real = before[l ^ operand.lane].real;
  }
}

void Machine::Execute(Operation operation, std::uint32_t first) {
  Fiber* lanes = fibers_.data() + first;
  switch (operation) {
    case Operation::kNone:
    case Operation::kSyncBlock:
      return;
    case Operation::kSyncWarp:
      for (std::uint32_t l = 0; l < kWarpLanes; ++l) ShowLanded(lanes[l]);
      return;
    case Operation::kBallot:
    case Operation::kShuffle:
    case Operation::kShuffleXor:
      return ExecuteExchange(operation, lanes);
    case Operation::kLoadMatrices:
      return ExecuteLoadMatrices(lanes, false);
    case Operation::kLoadMatricesTransposed:
      return ExecuteLoadMatrices(lanes, true);
    case Operation::kTransposeMatrix:
      return ExecuteTranspose(lanes);
    case Operation::kMultiplyAdd:
      return ExecuteMultiplyAdd(lanes);
    case Operation::kMultiplyBytes:
      return ExecuteMultiplyBytes(lanes);
  }
}

void Machine::Run() {
  const std::uint64_t blocks =
      std::uint64_t{launch_.blocks_x} * launch_.blocks_y * launch_.blocks_z;
  std::vector<std::uint64_t> order(blocks);
  for (std::uint64_t i = 0; i < blocks; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_);
  for (std::uint64_t i : order) {
    block[0] = static_cast<std::uint32_t>(i % launch_.blocks_x);
    block[1] = static_cast<std::uint32_t>(i / launch_.blocks_x % launch_.blocks_y);
    block[2] = static_cast<std::uint32_t>(i / launch_.blocks_x / launch_.blocks_y);
    RunBlock();
  }
}

void CompleteOldest(Fiber& fiber) {
  fiber.landed.insert(fiber.landed.end(), fiber.groups.front().begin(), fiber.groups.front().end());
  fiber.groups.pop_front();
}

}  // namespace

void EmulateGpu(const GpuLaunch& launch, const std::function<void()>& kernel) {
  Machine emulated(launch, kernel);
  machine = &emulated;
  emulated.Run();
  machine = nullptr;
}

}  // namespace tessera::tests

namespace tessera::kernels::cuda::gpu {

using tests::machine;
using tests::Operation;
using tests::Require;

std::uint32_t Thread() { return machine->thread(); }
std::uint32_t Threads() { return machine->launch().threads; }
std::uint32_t BlockX() { return machine->block[0]; }
std::uint32_t BlockY() { return machine->block[1]; }
std::uint32_t BlockZ() { return machine->block[2]; }
std::uint32_t GridX() { return machine->launch().blocks_x; }
std::byte* SharedMemory() { return machine->shared(); }
void SyncBlock() { machine->Await(Operation::kSyncBlock); }
void SyncWarp() { machine->Await(Operation::kSyncWarp); }

std::uint32_t Ballot(bool predicate) {
  machine->operand().integer = predicate ? 1 : 0;
  machine->Await(Operation::kBallot);
  return static_cast<std::uint32_t>(machine->operand().integer);
}

std::uint64_t Shuffle(std::uint64_t value, std::uint32_t lane) {
  machine->operand().integer = value;
  machine->operand().lane = lane;
  machine->Await(Operation::kShuffle);
  return machine->operand().integer;
}

float ShuffleXor(float value, std::uint32_t mask) {
  machine->operand().real = value;
  machine->operand().lane = mask;
  machine->Await(Operation::kShuffleXor);
  return machine->operand().real;
}

void StartCopy(std::byte* shared, const std::byte* source, std::size_t bytes, bool live) {
  Require(machine->InShared(shared, bytes), "cp.async beyond shared memory");
  Require(reinterpret_cast<std::uintptr_t>(shared) % bytes == 0,
          "cp.async to a misaligned address");
  Require(reinterpret_cast<std::uintptr_t>(source) % bytes == 0,
          "cp.async from a misaligned address");
  std::memset(shared, 0xff, bytes);
  machine->fiber().open_group.push_back({shared, live ? source : nullptr, bytes});
}

void CopyChunk(std::byte* shared, const std::byte* source, bool live) {
  StartCopy(shared, source, 16, live);
}
void CopyWord(std::byte* shared, const std::byte* source) { StartCopy(shared, source, 4, true); }

void CommitCopies() {
  tests::Fiber& fiber = machine->fiber();
  fiber.groups.push_back(std::move(fiber.open_group));
  fiber.open_group.clear();
}

void WaitForCopies(std::uint32_t pending) {
  while (machine->fiber().groups.size() > pending) tests::CompleteOldest(machine->fiber());
}

void LoadMatrices(std::uint32_t (&fragment)[4], const std::byte* shared_row) {
  Require(machine->InShared(shared_row, 16), "ldmatrix beyond shared memory");
  machine->operand().row = shared_row;
  machine->operand().fragment = fragment;
  machine->Await(Operation::kLoadMatrices);
}

void LoadMatricesTransposed(std::uint32_t (&fragment)[4], const std::byte* shared_row) {
  Require(machine->InShared(shared_row, 16), "ldmatrix beyond shared memory");
  machine->operand().row = shared_row;
  machine->operand().fragment = fragment;
  machine->Await(Operation::kLoadMatricesTransposed);
}

std::uint32_t TransposeMatrix(std::uint32_t pair) {
  machine->operand().integer = pair;
  machine->Await(Operation::kTransposeMatrix);
  return static_cast<std::uint32_t>(machine->operand().integer);
}

void MultiplyAdd(ElementType type, float (&c)[4], const std::uint32_t (&a)[4],
                 const std::uint32_t (&b)[2]) {
  machine->operand().type = type;
  machine->operand().c = c;
  machine->operand().a = a;
  machine->operand().b = b;
  machine->Await(Operation::kMultiplyAdd);
}

void MmaBytes(std::int32_t (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  machine->operand().sums = c;
  machine->operand().a = a;
  machine->operand().b = b;
  machine->Await(Operation::kMultiplyBytes);
}

std::uint64_t LoadOnce(const std::uint64_t* word) { return *word; }
Chunk LoadChunkOnce(const Chunk* chunk) { return *chunk; }
void AtomicMin(std::uint64_t* word, std::uint64_t value) { *word = std::min(*word, value); }
void AtomicAdd(std::uint32_t* word, std::uint32_t value) { *word += value; }

}  // namespace tessera::kernels::cuda::gpu
