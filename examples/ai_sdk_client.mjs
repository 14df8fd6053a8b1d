// The AI SDK with `outrider serve`: a stream, tools, structured output, and an answer that is broken off.
//
// Only the base URL is Outrider's. Run with ai 6.0.326, @ai-sdk/openai 3.0.141, @ai-sdk/openai-compatible 2.0.91 and Node 20.
// Start `outrider serve` first, with a model that can call tools, then this program.

import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const baseURL = process.env.OPENAI_BASE_URL ?? 'http://127.0.0.1:8000/v1'
const apiKey = process.env.OUTRIDER_API_KEY ?? 'none'
const name = process.env.OUTRIDER_MODEL ?? 'outrider-demo-target'
const openai = createOpenAI({ baseURL, apiKey })
const compatible = createOpenAICompatible({ name: 'outrider', baseURL, apiKey, supportsStructuredOutputs: true })

const weather = z.object({ sky: z.enum(['clear', 'cloudy', 'rainy']), degrees: z.number().int().min(-40).max(50) })
const forecast = tool({
  description: 'The weather in a city, some days from now',
  inputSchema: z.object({ city: z.enum(['Lisbon', 'Oslo']), days: z.number().int().min(1).max(9) }),
  execute: async ({ city, days }) => `${city} in ${days} days: clear, 20 degrees`,
})

async function main(model) {
  const answer = streamText({ model, prompt: 'Write a haiku about a dog that runs ahead.', maxOutputTokens: 24 })
  for await (const piece of answer.textStream) process.stdout.write(piece)

  const { steps } = await generateText({
    model,
    prompt: 'What is the weather in Oslo?',
    tools: { forecast },
    // The first step calls the tool, the second says something to the result.
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? 'none' : { type: 'tool', toolName: 'forecast' } }),
    stopWhen: stepCountIs(2),
    maxOutputTokens: 200,
  })
  console.log('\nthe tool returned', steps[0].toolResults[0].output)

  console.log(await generateObject({ model, schema: weather, prompt: 'How is the weather?' }).then((made) => made.object))

  const leaving = new AbortController()
  const long = streamText({ model, prompt: 'Count to a million.', abortSignal: leaving.signal })
  for await (const piece of long.textStream) {
    leaving.abort()
    console.log('broken off after', JSON.stringify(piece))
    break
  }
}

for (const model of [openai.responses(name), openai.chat(name), compatible(name)]) {
  console.log(`--- ${model.provider}`)
  await main(model)
}
