// Functions of newer C libraries that the compiler's static runtime calls, for systems with glibc
// 2.34: the wheel's library then asks for nothing newer.

#include <link.h>
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

// What glibc 2.35 declares.
struct FoundObject {
  unsigned long long flags;
  void* map_start;
  void* map_end;
  link_map* map;
  void* eh_frame;
  unsigned long long reserved[7];
};

namespace {

struct Search {
  std::uintptr_t address;
  FoundObject* found;
};

int Look(dl_phdr_info* info, std::size_t, void* context) {
  auto& search = *static_cast<Search*>(context);
  bool contains = false;
  std::uintptr_t first = UINTPTR_MAX, end = 0, eh_frame = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    const std::uintptr_t at = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_GNU_EH_FRAME) eh_frame = at;
    if (header.p_type != PT_LOAD) continue;
    first = at < first ? at : first;
    end = at + header.p_memsz > end ? at + header.p_memsz : end;
    contains = contains || (search.address >= at && search.address < at + header.p_memsz);
  }
  if (!contains || eh_frame == 0) return 0;
  *search.found = {.flags = 0,
                   .map_start = reinterpret_cast<void*>(first),
                   .map_end = reinterpret_cast<void*>(end),
                   .map = nullptr,
                   .eh_frame = reinterpret_cast<void*>(eh_frame),
                   .reserved = {}};
  return 1;
}

}  // namespace

// Newer headers declare the same names with other types.
extern "C" int FindObject(void* address, FoundObject* found) __asm__("_dl_find_object");
extern "C" std::uint32_t RandomNumber() __asm__("arc4random");

// libgcc's unwinder: finds the object that contains an instruction. 0: found.
extern "C" int FindObject(void* address, FoundObject* found) {
  Search search = {reinterpret_cast<std::uintptr_t>(address), found};
  return ::dl_iterate_phdr(Look, &search) == 1 ? 0 : -1;
}

// libstdc++'s std::random_device.
extern "C" std::uint32_t RandomNumber() {
  std::uint32_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) std::abort();
  return number;
}
