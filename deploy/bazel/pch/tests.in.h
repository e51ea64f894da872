// What most tests include beside libraries.in.h, behind which this comes.
#ifndef __clang__

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif
