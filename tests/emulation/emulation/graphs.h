// Recordings of streams, and the graphs that they become.
//
// A recording is a list: the work of all its streams in the order in which it was put there, which is an order that
// the dependencies allow.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <thread>
#include <vector>

namespace emulation {

struct Node {
  cudaGraphNodeType type = cudaGraphNodeTypeKernel;
  void* to = nullptr;  // of copies
  const void* from = nullptr;
  Step step;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Recording {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  const void* origin = nullptr;  // the queue on which it was begun
  Graph graph;
  bool invalid = false, ended = false;
  // Work of each other queue in it that the origin has not waited for.
  std::map<const void*, std::size_t> unjoined;
};

// Whether recordings forbid this thread calls that might wait for the device; if so they are invalid from here on.
bool unsafe_call_forbidden();
void recording_begun(const std::shared_ptr<Recording>& recording);
void recording_ended(const Recording& recording);

}  // namespace emulation
