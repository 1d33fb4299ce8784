// Converts the daemon's answers to public structs.
#pragma once

#include "tessera/compression.h"
#include "tessera/description.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

PolicyNeeds FromProto(const v1::PolicyNeeds& needs);
CompressResult FromProto(const v1::CompressResponse& response);
SelectResult FromProto(const v1::SelectResponse& response);
SequenceDescription FromProto(const v1::DescribeResponse& response);
DaemonStats FromProto(const v1::StatsResponse& response);
DaemonInfo FromProto(const v1::Welcome& welcome);

}  // namespace tessera::client
