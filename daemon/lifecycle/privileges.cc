#include "daemon/lifecycle/privileges.h"

#include <sys/prctl.h>
#include <sys/resource.h>

namespace tessera::lifecycle {

void GiveUpPrivileges(const Privileges& kept) {
  // None of these can fail with these arguments.
  (void)::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (kept.core_dumps) return;
  const rlimit none = {.rlim_cur = 0, .rlim_max = 0};
  (void)::setrlimit(RLIMIT_CORE, &none);
  (void)::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

}  // namespace tessera::lifecycle
