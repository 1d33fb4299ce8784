// The messages of the descriptor socket: a Unix stream socket next to the gRPC socket. A mapped
// session fetches the file descriptors of its mappings over it, and keeps it open: if it closes,
// the daemon ends the session.
//
// The client sends one DescriptorOpening, then any number of DescriptorRequests. The daemon answers
// each with one DescriptorAnswer. The answer carries a file descriptor (SCM_RIGHTS) if and only if
// its code is kOk and the memory is not shared by a CUDA IPC handle.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::shm {

inline constexpr std::uint64_t kDescriptorMagic = 0x5445535346445331;  // "TESSFDS1"

enum class DescriptorKind : std::uint32_t {
  kOpening = 0,    // the answer to the opening; carries the session's eventfd for wakes
  kDirectory = 1,  // index: directory extent; read-only
  kPool = 2,       // index: pool extent; read-only
  kControl = 3,    // index 0; read-write
  kStaging = 4,    // index 0; read-write
  kTail = 5,       // index: tail extent of this session; read-write
};

enum class DescriptorCode : std::uint32_t {
  kOk = 0,
  kBadOpening = 1,    // magic, version or fingerprint differ
  kUnknownNonce = 2,  // the nonce is used, or was never issued for this session
  kNoSuchIndex = 3,
  kBadRequest = 4,
  kExhausted = 5,  // a quota or the node has no memory or descriptors left
};

// How a client maps the memory of an answer. The CUDA kinds apply to pools, staging and tails;
// directory and control page are always host memory.
enum class MemoryKind : std::uint32_t {
  kHost = 0,            // a memfd
  kCudaDescriptor = 1,  // a descriptor for cuMemImportFromShareableHandle
  kCudaIpc = 2,         // `ipc_handle`, for cudaIpcOpenMemHandle; maps `bytes` from its start
};

struct DescriptorOpening {
  std::uint64_t magic;
  std::uint32_t protocol_version;
  std::uint32_t reserved;
  std::uint64_t layout_fingerprint;
  std::uint64_t session_id;
  std::uint64_t nonce;
};
static_assert(sizeof(DescriptorOpening) == 40);

struct DescriptorRequest {
  DescriptorKind kind;
  std::uint32_t index;
};
static_assert(sizeof(DescriptorRequest) == 8);

struct DescriptorAnswer {
  DescriptorCode code;
  DescriptorKind kind;
  std::uint32_t index;
  std::uint32_t generation;  // of the extent; only for kPool and kDirectory
  std::uint64_t bytes;       // size of the mapping
  MemoryKind memory;
  std::uint32_t reserved;
  std::byte ipc_handle[64];
};
static_assert(offsetof(DescriptorAnswer, memory) == 24);
static_assert(sizeof(DescriptorAnswer) == 96);

}  // namespace tessera::shm
