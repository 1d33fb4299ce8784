// A CUDA driver that only does the bookkeeping of device memory: it tracks every object until it is
// released, records every call, and fails the chosen call.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/cuda_calls.h"

namespace tessera::tests {

class FakeCuda final : public CudaCalls {
 public:
  // Capabilities that the device reports.
  bool exports_fds = true;
  std::uint64_t granularity = std::uint64_t{2} << 20;
  int devices = 1;
  int current = 0;                // device of the calling thread
  std::vector<DeviceUuid> uuids;  // of the first devices; the others have zeros
  // The call to fail, counted from 0; -1: none. `failure` is its result.
  int fail_at = -1;
  CudaResult failure = {.code = 999, .name = "CUDA_ERROR_UNKNOWN"};

  std::vector<std::string> calls;

  // Number of objects that are not released yet.
  std::size_t live() const {
    return handles_.size() + ranges_.size() + mappings_.size() + allocations_.size() +
           imports_.size();
  }
  // Access of the mapping at `address`. Empty if nothing is accessible there.
  std::string AccessAt(DeviceAddress address) const {
    const auto found = mappings_.find(address);
    return found == mappings_.end() ? "unmapped" : found->second;
  }

  CudaResult DeviceCount(int* count) override {
    *count = devices;
    return Enter("DeviceCount");
  }
  CudaResult DescribeDevice(int device, CudaDeviceInfo* info) override {
    if (CudaResult result = Enter("DescribeDevice"); !result.ok()) return result;
    info->ordinal = device;
    info->name = "fake";
    if (device < static_cast<int>(uuids.size())) info->uuid = uuids[device];
    info->exports_fds = exports_fds;
    info->granularity = granularity;
    return {};
  }
  CudaResult CurrentDevice(int* device) override {
    *device = current;
    return Enter("CurrentDevice");
  }
  CudaResult Create(int, std::uint64_t, std::uint64_t* handle) override {
    return Add("Create", handles_, handle);
  }
  CudaResult Release(std::uint64_t handle) override { return Remove("Release", handles_, handle); }
  CudaResult ExportFd(std::uint64_t handle, int* fd) override {
    if (CudaResult result = Enter("ExportFd"); !result.ok()) return result;
    if (!Has(handles_, handle)) return Broken("export of what does not exist");
    *fd = ::open("/dev/null", O_RDWR);  // without O_CLOEXEC, as some drivers do
    return {};
  }
  CudaResult ImportFd(int, int, std::uint64_t* handle) override {
    return Add("ImportFd", handles_, handle);
  }
  CudaResult Reserve(std::uint64_t, std::uint64_t, DeviceAddress* address) override {
    return Add("Reserve", ranges_, address);
  }
  CudaResult FreeReservation(DeviceAddress address, std::uint64_t) override {
    if (!mappings_.empty()) return Broken("addresses freed under a mapping");
    return Remove("FreeReservation", ranges_, address);
  }
  CudaResult Map(DeviceAddress address, std::uint64_t, std::uint64_t handle) override {
    if (CudaResult result = Enter("Map"); !result.ok()) return result;
    if (!Has(handles_, handle)) return Broken("mapping of what does not exist");
    if (!mappings_.emplace(address, "no access").second) return Broken("mapped twice");
    return {};
  }
  CudaResult Unmap(DeviceAddress address, std::uint64_t) override {
    if (CudaResult result = Enter("Unmap"); !result.ok()) return result;
    return mappings_.erase(address) == 1 ? CudaResult{} : Broken("unmapping what is not mapped");
  }
  CudaResult SetAccess(int, DeviceAddress address, std::uint64_t, Access access) override {
    if (CudaResult result = Enter("SetAccess"); !result.ok()) return result;
    mappings_[address] = access == Access::kReadOnly ? "read-only" : "read-write";
    return {};
  }
  CudaResult Clear(int, DeviceAddress address, std::uint64_t) override {
    if (CudaResult result = Enter("Clear"); !result.ok()) return result;
    const bool writable = AccessAt(address) == "read-write" || Has(allocations_, address);
    return writable ? CudaResult{} : Broken("clearing what is not writable");
  }
  CudaResult Allocate(int, std::uint64_t, DeviceAddress* address) override {
    return Add("Allocate", allocations_, address);
  }
  CudaResult Free(int, DeviceAddress address) override {
    return Remove("Free", allocations_, address);
  }
  CudaResult ExportIpc(int, DeviceAddress, CudaIpcHandle* handle) override {
    handle->fill(std::byte{7});
    return Enter("ExportIpc");
  }
  CudaResult OpenIpc(int, const CudaIpcHandle&, DeviceAddress* address) override {
    return Add("OpenIpc", imports_, address);
  }
  CudaResult CloseIpc(int, DeviceAddress address) override {
    return Remove("CloseIpc", imports_, address);
  }

  // The first misuse that a real driver would reject; empty if there was none.
  std::string broken;

 private:
  using Books = std::vector<std::uint64_t>;

  static bool Has(const Books& books, std::uint64_t id) {
    return std::find(books.begin(), books.end(), id) != books.end();
  }
  CudaResult Enter(std::string name) {
    const bool fails = static_cast<int>(calls.size()) == fail_at;
    calls.push_back(std::move(name));
    return fails ? failure : CudaResult{};
  }
  CudaResult Add(std::string name, Books& books, std::uint64_t* id) {
    if (CudaResult result = Enter(std::move(name)); !result.ok()) return result;
    books.push_back(next_ += std::uint64_t{1} << 40);
    *id = next_;
    return {};
  }
  CudaResult Remove(std::string name, Books& books, std::uint64_t id) {
    if (CudaResult result = Enter(std::move(name)); !result.ok()) return result;
    if (!Has(books, id)) return Broken(calls.back() + " of what does not exist");
    books.erase(std::find(books.begin(), books.end(), id));
    return {};
  }
  CudaResult Broken(std::string what) {
    broken = std::move(what);
    return failure;
  }

  std::uint64_t next_ = 0;
  Books handles_, ranges_, allocations_, imports_;
  std::map<DeviceAddress, std::string> mappings_;
};

}  // namespace tessera::tests
