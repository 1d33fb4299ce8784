// Numbers printed by Python: random.Random(seed).random().

#include "client/eval/tasks/python_random.h"

#include <gtest/gtest.h>

namespace tessera::cli::eval {
namespace {

TEST(PythonRandom, GivesPythonsNumbers) {
  {
    PythonRandom random(0u);
    EXPECT_EQ(random.Next(), 0.8444218515250481);
    EXPECT_EQ(random.Next(), 0.7579544029403025);
    for (int i = 2; i < 999; ++i) random.Next();
    EXPECT_EQ(random.Next(), 0.4804125346981437);
  }
  {
    PythonRandom random(1u);
    EXPECT_EQ(random.Next(), 0.13436424411240122);
    EXPECT_EQ(random.Next(), 0.8474337369372327);
    for (int i = 2; i < 999; ++i) random.Next();
    EXPECT_EQ(random.Next(), 0.7062615472551386);
  }
  {
    PythonRandom random(42u);
    EXPECT_EQ(random.Next(), 0.6394267984578837);
    EXPECT_EQ(random.Next(), 0.025010755222666936);
    for (int i = 2; i < 999; ++i) random.Next();
    EXPECT_EQ(random.Next(), 0.8554501933059546);
  }
  {
    PythonRandom random(4294967295u);
    EXPECT_EQ(random.Next(), 0.6353574441341173);
    EXPECT_EQ(random.Next(), 0.20319993954407756);
    for (int i = 2; i < 999; ++i) random.Next();
    EXPECT_EQ(random.Next(), 0.3214643568909129);
  }
  {
    PythonRandom random(4294967296ull);
    EXPECT_EQ(random.Next(), 0.11299430095636409);
    EXPECT_EQ(random.Next(), 0.41782886486292836);
    for (int i = 2; i < 999; ++i) random.Next();
    EXPECT_EQ(random.Next(), 0.04156870367167198);
  }
  {
    PythonRandom random(11400714819323198485ull);
    EXPECT_EQ(random.Next(), 0.3366221479490874);
    EXPECT_EQ(random.Next(), 0.4803007507283692);
    for (int i = 2; i < 999; ++i) random.Next();
    EXPECT_EQ(random.Next(), 0.3185883999669996);
  }
}

}  // namespace
}  // namespace tessera::cli::eval
