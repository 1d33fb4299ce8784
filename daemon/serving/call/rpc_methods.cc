#include "daemon/serving/call/rpc_methods.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <string>

#include "daemon/base/check.h"
#include "tessera/v1/admin.pb.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {
namespace {

// Worker calls that touch no rows, or read them for one token. All others move rows or wait.
constexpr std::string_view kHotMethods[] = {"Attend", "CreateSequence", "Describe",
                                            "Fork",   "Free",           "Handover",
                                            "Select", "Stats",          "Truncate"};

void AddMethodsOf(const google::protobuf::FileDescriptor& file, std::string_view service,
                  metrics::Metrics& metrics) {
  const google::protobuf::ServiceDescriptor* const found =
      file.FindServiceByName(std::string(service));
  TESSERA_CHECK(found != nullptr, "the file describes the service");
  for (int i = 0; i < found->method_count(); ++i) {
    const std::string& method = found->method(i)->name();
    const bool hot = std::ranges::find(kHotMethods, method) != std::end(kHotMethods);
    metrics.AddRpc(service, method,
                   service == kAdminServiceName ? metrics::RpcClass::kAdmin
                   : hot                        ? metrics::RpcClass::kHot
                                                : metrics::RpcClass::kBulk);
  }
}

}  // namespace

void AddRpcMethods(metrics::Metrics& metrics) {
  AddMethodsOf(*v1::Hello::descriptor()->file(), kWorkerServiceName, metrics);
  AddMethodsOf(*v1::DrainRequest::descriptor()->file(), kAdminServiceName, metrics);
}

}  // namespace tessera::serving
