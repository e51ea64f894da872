// Finds network devices over which NCCL can use RDMA.
#ifndef RINGATTN_WORKER_COMM_NCCL_RDMA_DEVICES_H_
#define RINGATTN_WORKER_COMM_NCCL_RDMA_DEVICES_H_

#include <string>

namespace ringattn::worker {

// Returns the names of InfiniBand and RoCE devices with an active port, separated by commas; empty
// if there is none, or if NCCL_IB_DISABLE or NCCL_NET=Socket keeps NCCL from using them.
//   sysfs  the folder of the kernel's devices
std::string ActiveRdmaDevices(const std::string& sysfs = "/sys/class/infiniband");

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_RDMA_DEVICES_H_
