#include "daemon/platform/cuda_calls.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera {

namespace {

// The driver's functions, each with the interface version that this code was written for.
struct DriverFunctions {
  PFN_cuGetErrorName_v6000 get_error_name = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  PFN_cuDeviceGetUuid_v9020 gpu_uuid = nullptr;   // of the whole GPU
  PFN_cuDeviceGetUuid_v11040 own_uuid = nullptr;  // in MIG mode: of the instance
  PFN_cuCtxGetDevice_v2000 context_device = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 granularity = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 export_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 import_handle = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve = nullptr;
  PFN_cuMemAddressFree_v10020 free_reservation = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
};

absl::Status RuntimeStatus(cudaError_t error, std::string_view what) {
  return absl::FailedPreconditionError(
      Concat(what, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")"));
}

template <class Function>
absl::Status Find(const char* name, unsigned version, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &answer);
  if (error != cudaSuccess) return RuntimeStatus(error, Concat("no CUDA driver: ", name));
  if (answer != cudaDriverEntryPointSuccess || found == nullptr) {
    return absl::FailedPreconditionError(Concat("the CUDA driver has no ", name));
  }
  function = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

absl::Status FindAll(DriverFunctions& driver) {
  absl::Status status;
  const auto find = [&status](const char* name, unsigned version, auto& function) {
    if (status.ok()) status = Find(name, version, function);
  };
  find("cuGetErrorName", 6000, driver.get_error_name);
  find("cuDeviceGetAttribute", 2000, driver.device_get_attribute);
  find("cuDeviceGetUuid", 9020, driver.gpu_uuid);
  find("cuDeviceGetUuid", 11040, driver.own_uuid);
  find("cuCtxGetDevice", 2000, driver.context_device);
  find("cuMemGetAllocationGranularity", 10020, driver.granularity);
  find("cuMemCreate", 10020, driver.create);
  find("cuMemRelease", 10020, driver.release);
  find("cuMemExportToShareableHandle", 10020, driver.export_handle);
  find("cuMemImportFromShareableHandle", 10020, driver.import_handle);
  find("cuMemAddressReserve", 10020, driver.reserve);
  find("cuMemAddressFree", 10020, driver.free_reservation);
  find("cuMemMap", 10020, driver.map);
  find("cuMemUnmap", 10020, driver.unmap);
  find("cuMemSetAccess", 10020, driver.set_access);
  return status;
}

CudaResult Answer(cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // reported here; must not surface at a later kernel launch
  return {.code = static_cast<int>(error), .name = cudaGetErrorName(error)};
}

CUmemAllocationProp DeviceMemory(int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

class LoadedCuda final : public CudaCalls {
 public:
  explicit LoadedCuda(const DriverFunctions& driver) : driver_(driver) {}

  CudaResult DeviceCount(int* count) override { return Answer(cudaGetDeviceCount(count)); }

  CudaResult DescribeDevice(int device, CudaDeviceInfo* info) override {
    cudaDeviceProp properties;
    if (CudaResult result = Answer(cudaGetDeviceProperties(&properties, device)); !result.ok()) {
      return result;
    }
    info->ordinal = device;
    info->name = properties.name;
    info->compute_major = properties.major;
    info->compute_minor = properties.minor;
    info->memory_bytes = properties.totalGlobalMem;
    if (CudaResult result = ReadUuid(device, info->uuid); !result.ok()) return result;
    int has_virtual_memory = 0;
    int has_descriptors = 0;
    CUresult error = driver_.device_get_attribute(
        &has_virtual_memory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
    if (error == CUDA_SUCCESS) {
      error = driver_.device_get_attribute(
          &has_descriptors, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
          device);
    }
    if (error != CUDA_SUCCESS) return Answer(error);
    info->exports_fds = has_virtual_memory != 0 && has_descriptors != 0;
    if (!info->exports_fds) return {};
    const CUmemAllocationProp memory = DeviceMemory(device);
    std::size_t granularity = 0;
    error = driver_.granularity(&granularity, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    info->granularity = granularity;
    return Answer(error);
  }

  CudaResult CurrentDevice(int* device) override {
    // The caller's own CUDA runtime may have made a context current that this runtime did not make.
    CUdevice current = 0;
    if (driver_.context_device(&current) != CUDA_SUCCESS) return Answer(cudaGetDevice(device));
    *device = current;
    return {};
  }

  CudaResult Create(int device, std::uint64_t bytes, std::uint64_t* handle) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    const CUmemAllocationProp memory = DeviceMemory(device);
    CUmemGenericAllocationHandle created = 0;
    const CUresult error = driver_.create(&created, bytes, &memory, 0);
    *handle = created;
    return Answer(error);
  }
  CudaResult Release(std::uint64_t handle) override { return Answer(driver_.release(handle)); }

  CudaResult ExportFd(std::uint64_t handle, int* fd) override {
    return Answer(driver_.export_handle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  }
  CudaResult ImportFd(int device, int fd, std::uint64_t* handle) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    CUmemGenericAllocationHandle imported = 0;
    const CUresult error =
        driver_.import_handle(&imported, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    *handle = imported;
    return Answer(error);
  }

  CudaResult Reserve(std::uint64_t bytes, std::uint64_t alignment,
                     DeviceAddress* address) override {
    CUdeviceptr reserved = 0;
    const CUresult error = driver_.reserve(&reserved, bytes, alignment, 0, 0);
    *address = reserved;
    return Answer(error);
  }
  CudaResult FreeReservation(DeviceAddress address, std::uint64_t bytes) override {
    return Answer(driver_.free_reservation(address, bytes));
  }
  CudaResult Map(DeviceAddress address, std::uint64_t bytes, std::uint64_t handle) override {
    return Answer(driver_.map(address, bytes, 0, handle, 0));
  }
  CudaResult Unmap(DeviceAddress address, std::uint64_t bytes) override {
    return Answer(driver_.unmap(address, bytes));
  }
  CudaResult SetAccess(int device, DeviceAddress address, std::uint64_t bytes,
                       Access access) override {
    CUmemAccessDesc description = {};
    description.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    description.location.id = device;
    description.flags = access == Access::kReadOnly ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                    : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return Answer(driver_.set_access(address, bytes, &description, 1));
  }

  CudaResult Clear(int device, DeviceAddress address, std::uint64_t bytes) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    // A stream of its own: the default one would wait for the kernels of all others.
    cudaStream_t stream = nullptr;
    CudaResult result = Answer(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (!result.ok()) return result;
    result = Answer(cudaMemsetAsync(reinterpret_cast<void*>(address), 0, bytes, stream));
    if (result.ok()) result = Answer(cudaStreamSynchronize(stream));
    (void)cudaStreamDestroy(stream);
    return result;
  }

  CudaResult Allocate(int device, std::uint64_t bytes, DeviceAddress* address) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    void* allocated = nullptr;
    const cudaError_t error = cudaMalloc(&allocated, bytes);
    *address = reinterpret_cast<DeviceAddress>(allocated);
    return Answer(error);
  }
  CudaResult Free(int device, DeviceAddress address) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    return Answer(cudaFree(reinterpret_cast<void*>(address)));
  }
  CudaResult ExportIpc(int device, DeviceAddress address, CudaIpcHandle* handle) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    cudaIpcMemHandle_t exported;
    static_assert(sizeof exported == sizeof *handle);
    const cudaError_t error = cudaIpcGetMemHandle(&exported, reinterpret_cast<void*>(address));
    if (error == cudaSuccess) std::memcpy(handle->data(), &exported, sizeof exported);
    return Answer(error);
  }
  CudaResult OpenIpc(int device, const CudaIpcHandle& handle, DeviceAddress* address) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    cudaIpcMemHandle_t imported;
    std::memcpy(&imported, handle.data(), sizeof imported);
    void* opened = nullptr;
    const cudaError_t error =
        cudaIpcOpenMemHandle(&opened, imported, cudaIpcMemLazyEnablePeerAccess);
    *address = reinterpret_cast<DeviceAddress>(opened);
    return Answer(error);
  }
  CudaResult CloseIpc(int device, DeviceAddress address) override {
    if (CudaResult result = Answer(cudaSetDevice(device)); !result.ok()) return result;
    return Answer(cudaIpcCloseMemHandle(reinterpret_cast<void*>(address)));
  }

 private:
  CudaResult ReadUuid(int device, DeviceUuid& uuid) const {
    CUuuid own = {};
    CUuuid gpu = {};
    CUresult error = driver_.own_uuid(&own, device);
    if (error == CUDA_SUCCESS) error = driver_.gpu_uuid(&gpu, device);
    if (error != CUDA_SUCCESS) return Answer(error);
    static_assert(sizeof own.bytes == sizeof uuid.bytes);
    std::memcpy(uuid.bytes.data(), own.bytes, sizeof own.bytes);
    const bool is_instance = std::memcmp(own.bytes, gpu.bytes, sizeof own.bytes) != 0;
    uuid.kind = is_instance ? DeviceUuid::Kind::kMig : DeviceUuid::Kind::kGpu;
    return {};
  }

  CudaResult Answer(CUresult error) const {
    if (error == CUDA_SUCCESS) return {};
    const char* name = nullptr;
    driver_.get_error_name(error, &name);
    return {.code = static_cast<int>(error), .name = name != nullptr ? name : "CUDA_ERROR"};
  }
  static CudaResult Answer(cudaError_t error) { return tessera::Answer(error); }

  const DriverFunctions driver_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaCalls>> LoadCuda() {
  int devices = 0;
  // Loads libcuda.so.1 if it exists, and initialises the driver.
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    return RuntimeStatus(error, "no CUDA device");
  }
  DriverFunctions driver;
  if (absl::Status status = FindAll(driver); !status.ok()) return status;
  return std::make_unique<LoadedCuda>(driver);
}

}  // namespace tessera
