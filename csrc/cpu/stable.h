// SPDX-License-Identifier: Apache-2.0
// torch's stable-ABI headers: the only interface to libtorch that this library uses.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
