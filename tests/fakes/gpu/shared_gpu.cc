#include "tests/fakes/gpu/shared_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace tessera::tests {

namespace {

constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;
constexpr CudaResult kInvalid = {.code = 1, .name = "CUDA_ERROR_INVALID_VALUE"};
constexpr CudaResult kNoMemory = {.code = 2, .name = "CUDA_ERROR_OUT_OF_MEMORY"};

void* Pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }

bool NewMemory(std::uint64_t bytes, Fd* memory) {
  *memory = Fd(::memfd_create("shared-gpu", MFD_CLOEXEC));
  return memory->valid() && ::ftruncate(memory->get(), static_cast<off_t>(bytes)) == 0;
}

}  // namespace

SharedGpu::~SharedGpu() {
  for (const auto& [address, piece] : allocations_) ::munmap(Pointer(address), piece.bytes);
}

std::size_t SharedGpu::live() const {
  MutexLock lock(mutex_);
  return pieces_.size() + allocations_.size();
}

CudaResult SharedGpu::DeviceCount(int* count) {
  *count = static_cast<int>(options_.uuids.size());
  return {};
}

CudaResult SharedGpu::DescribeDevice(int device, CudaDeviceInfo* info) {
  if (device < 0 || device >= static_cast<int>(options_.uuids.size())) return kInvalid;
  info->ordinal = device;
  info->name = "emulated GPU";
  info->uuid = options_.uuids[static_cast<std::size_t>(device)];
  info->memory_bytes = options_.memory_bytes;
  info->granularity = kGranularity;
  info->exports_fds = options_.exports_fds;
  return {};
}

CudaResult SharedGpu::CurrentDevice(int* device) {
  *device = options_.current;
  return {};
}

CudaResult SharedGpu::Create(int, std::uint64_t bytes, std::uint64_t* handle) {
  if (!options_.exports_fds || bytes % kGranularity != 0) return kInvalid;
  Piece piece = {.bytes = bytes};
  if (!NewMemory(bytes, &piece.memory)) return kNoMemory;
  MutexLock lock(mutex_);
  *handle = next_handle_++;
  pieces_[*handle] = std::move(piece);
  return {};
}

CudaResult SharedGpu::Release(std::uint64_t handle) {
  MutexLock lock(mutex_);
  return pieces_.erase(handle) == 1 ? CudaResult{} : kInvalid;
}

CudaResult SharedGpu::ExportFd(std::uint64_t handle, int* fd) {
  MutexLock lock(mutex_);
  const auto it = pieces_.find(handle);
  if (it == pieces_.end()) return kInvalid;
  *fd = ::fcntl(it->second.memory.get(), F_DUPFD_CLOEXEC, 0);
  return *fd >= 0 ? CudaResult{} : kNoMemory;
}

CudaResult SharedGpu::ImportFd(int, int fd, std::uint64_t* handle) {
  struct stat facts;
  Piece piece = {.memory = Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0))};
  if (!piece.memory.valid() || ::fstat(fd, &facts) != 0) return kInvalid;
  piece.bytes = static_cast<std::uint64_t>(facts.st_size);
  MutexLock lock(mutex_);
  *handle = next_handle_++;
  pieces_[*handle] = std::move(piece);
  return {};
}

CudaResult SharedGpu::Reserve(std::uint64_t bytes, std::uint64_t, DeviceAddress* address) {
  void* const reserved =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return kNoMemory;
  *address = reinterpret_cast<DeviceAddress>(reserved);
  return {};
}

CudaResult SharedGpu::FreeReservation(DeviceAddress address, std::uint64_t bytes) {
  return ::munmap(Pointer(address), bytes) == 0 ? CudaResult{} : kInvalid;
}

CudaResult SharedGpu::Map(DeviceAddress address, std::uint64_t bytes, std::uint64_t handle) {
  MutexLock lock(mutex_);
  const auto it = pieces_.find(handle);
  if (it == pieces_.end() || it->second.bytes != bytes) return kInvalid;
  void* const mapped = ::mmap(Pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                              it->second.memory.get(), 0);
  return mapped != MAP_FAILED ? CudaResult{} : kInvalid;
}

// An unmapped address faults on access, as device memory does.
CudaResult SharedGpu::Unmap(DeviceAddress address, std::uint64_t bytes) {
  void* const reserved = ::mmap(Pointer(address), bytes, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return reserved != MAP_FAILED ? CudaResult{} : kInvalid;
}

CudaResult SharedGpu::SetAccess(int, DeviceAddress address, std::uint64_t bytes, Access access) {
  const int rights = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  return ::mprotect(Pointer(address), bytes, rights) == 0 ? CudaResult{} : kInvalid;
}

CudaResult SharedGpu::MapWhole(Fd memory, std::uint64_t bytes, DeviceAddress* address) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (mapped == MAP_FAILED) return kNoMemory;
  *address = reinterpret_cast<DeviceAddress>(mapped);
  MutexLock lock(mutex_);
  allocations_[*address] = {.memory = std::move(memory), .bytes = bytes};
  return {};
}

CudaResult SharedGpu::UnmapWhole(DeviceAddress address) {
  MutexLock lock(mutex_);
  const auto it = allocations_.find(address);
  if (it == allocations_.end()) return kInvalid;
  ::munmap(Pointer(address), it->second.bytes);
  allocations_.erase(it);
  return {};
}

CudaResult SharedGpu::Allocate(int, std::uint64_t bytes, DeviceAddress* address) {
  Fd memory;
  if (!NewMemory(bytes, &memory)) return kNoMemory;
  return MapWhole(std::move(memory), bytes, address);
}

CudaResult SharedGpu::Free(int, DeviceAddress address) { return UnmapWhole(address); }

// The handle holds process, descriptor and size; the importer opens it through /proc.
CudaResult SharedGpu::ExportIpc(int, DeviceAddress address, CudaIpcHandle* handle) {
  MutexLock lock(mutex_);
  const auto it = allocations_.find(address);
  if (it == allocations_.end()) return kInvalid;
  const std::uint64_t words[] = {static_cast<std::uint64_t>(::getpid()),
                                 static_cast<std::uint64_t>(it->second.memory.get()),
                                 it->second.bytes};
  handle->fill(std::byte{0});
  std::memcpy(handle->data(), words, sizeof words);
  return {};
}

CudaResult SharedGpu::OpenIpc(int, const CudaIpcHandle& handle, DeviceAddress* address) {
  std::uint64_t words[3];
  std::memcpy(words, handle.data(), sizeof words);
  const std::string path = "/proc/" + std::to_string(words[0]) + "/fd/" + std::to_string(words[1]);
  Fd memory(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!memory.valid()) return kInvalid;
  return MapWhole(std::move(memory), words[2], address);
}

CudaResult SharedGpu::CloseIpc(int, DeviceAddress address) { return UnmapWhole(address); }

}  // namespace tessera::tests
